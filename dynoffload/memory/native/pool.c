/* The pool: one reservation of addresses, a fixed number of pages in it, and their moves. */
#include "pager.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef UFFDIO_MOVE /* headers older than Linux 6.8 */
#define _UFFDIO_MOVE (0x05)
struct uffdio_move {
    __u64 dst, src, len;
#define UFFDIO_MOVE_MODE_DONTWAKE ((__u64)1 << 0)
    __u64 mode;
    __s64 move;
};
#define UFFDIO_MOVE _IOWR(UFFDIO, _UFFDIO_MOVE, struct uffdio_move)
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define HUGE_BYTES (2ul << 20)
#define GROWTH_BYTES (32ul << 20)

char *arena_address(struct pager *p, const struct region *r)
{
    return p->base + (uint64_t)r->page * p->page_bytes;
}

static char *slot_address(struct pager *p, uint32_t slot)
{
    return p->base + (uint64_t)(p->arena_pages + slot) * p->page_bytes;
}

int pool_map(struct pager *p)
{
    uint64_t arena = (uint64_t)p->arena_pages * p->page_bytes;
    uint64_t pool = (uint64_t)p->pool_pages * p->page_bytes;
    uint64_t total = arena + pool + HUGE_BYTES;
    char *map = mmap(NULL, total, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return errno;
    char *base = (char *)(((uintptr_t)map + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1));
    if (base > map)
        munmap(map, base - map);
    munmap(base + arena + pool, map + total - (base + arena + pool));
    p->base = base;
    madvise(base, arena + pool, p->page_bytes == HUGE_BYTES ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (madvise(base, arena + pool, MADV_DONTFORK)) /* MOVE refuses pages shared by fork */
        goto failed;
    madvise(base, arena + pool, MADV_DONTDUMP);
    struct uffdio_register reg = {.range = {(uintptr_t)base, arena},
                                  .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (ioctl(p->uffd, UFFDIO_REGISTER, &reg))
        goto failed;
    return 0;
failed:;
    int error = errno;
    munmap(base, arena + pool);
    p->base = NULL;
    return error;
}

void pool_unmap(struct pager *p)
{
    if (!p->base)
        return;
    uint64_t bytes = (uint64_t)(p->arena_pages + p->pool_pages) * p->page_bytes;
    munmap(p->base, bytes); /* unmapped while registered: no zero page is ever handed out */
    p->base = NULL;
}

/* Move one page; 0, or the error that will not pass by trying again. */
static int move_page(struct pager *p, char *to, char *from)
{
    struct uffdio_move m = {.dst = (uintptr_t)to, .src = (uintptr_t)from, .len = p->page_bytes};
    uint64_t done = 0;
    for (int attempt = 0; attempt < 20000; attempt++) {
        m.dst = (uintptr_t)to + done;
        m.src = (uintptr_t)from + done;
        m.len = p->page_bytes - done;
        m.move = 0;
        if (ioctl(p->uffd, UFFDIO_MOVE, &m) == 0)
            return 0;
        int error = errno;
        if (m.move > 0)
            done += (uint64_t)m.move;
        if (done == p->page_bytes)
            return 0;
        if (error == EBUSY && attempt > 2000 && done == 0)
            return EBUSY;
        if (error != EAGAIN && error != EBUSY)
            return error;
        if (attempt > 50)
            usleep(50);
    }
    return EBUSY;
}

int pool_install(struct pager *p, struct region *r)
{
    return pool_relocate(p, r, r->page, 0);
}

int pool_withdraw(struct pager *p, struct region *r)
{
    return pool_relocate(p, r, r->page, 1);
}

/* Move a region between slots and arena pages starting at `page`; all of it or nothing. */
int pool_relocate(struct pager *p, struct region *r, uint32_t page, int out)
{
    char *at = p->base + (uint64_t)page * p->page_bytes;
    if (out)
        for (uint32_t i = 0; i < r->pages; i++)
            r->slots[i] = p->vacant[--p->vacants];
    for (uint32_t i = 0; i < r->pages; i++) {
        char *slot = slot_address(p, r->slots[i]), *place = at + (uint64_t)i * p->page_bytes;
        int error = out ? move_page(p, slot, place) : move_page(p, place, slot);
        if (!error)
            continue;
        while (i-- > 0) {
            slot = slot_address(p, r->slots[i]);
            place = at + (uint64_t)i * p->page_bytes;
            if (out ? move_page(p, place, slot) : move_page(p, slot, place))
                abort(); /* half a region in two places: nothing sane is left to do */
        }
        if (out)
            for (uint32_t j = 0; j < r->pages; j++)
                p->vacant[p->vacants++] = r->slots[j];
        return error;
    }
    if (!out)
        for (uint32_t i = 0; i < r->pages; i++)
            p->vacant[p->vacants++] = r->slots[i];
    return 0;
}

/* Populate more slots, then register them: a read into an unpopulated slot would fault on itself. */
static void pool_grow(struct pager *p, uint32_t pages)
{
    uint32_t left = p->pool_pages - p->populated, step = (uint32_t)(GROWTH_BYTES / p->page_bytes);
    uint32_t count = pages > step ? pages : step < left ? step : left;
    char *from = slot_address(p, p->populated);
    uint64_t bytes = (uint64_t)count * p->page_bytes;
    struct uffdio_register reg = {.range = {(uintptr_t)from, bytes},
                                  .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (madvise(from, bytes, MADV_POPULATE_WRITE) || ioctl(p->uffd, UFFDIO_REGISTER, &reg)) {
        fprintf(stderr, "dynoffload: the system refuses %llu bytes that the budget allows: %s. "
                        "Lower the budget. The process ends here.\n",
                (unsigned long long)bytes, strerror(errno));
        abort();
    }
    for (uint32_t i = count; i-- > 0;)
        p->full[p->fulls++] = p->populated + i;
    p->populated += count;
}

/* Take as many slots as the region has pages; there is room for them. */
void pool_take_slots(struct pager *p, struct region *r)
{
    if (p->fulls < r->pages)
        pool_grow(p, r->pages - p->fulls);
    for (uint32_t i = 0; i < r->pages; i++)
        r->slots[i] = p->full[--p->fulls];
    uint64_t used = p->populated - p->fulls;
    p->counters.pages_in_use = used;
    if (used > p->counters.peak_pages)
        p->counters.peak_pages = used;
}

void pool_free_slots(struct pager *p, struct region *r)
{
    for (uint32_t i = 0; i < r->pages; i++)
        p->full[p->fulls++] = r->slots[i];
    p->counters.pages_in_use = p->populated - p->fulls;
}

void pool_wake(struct pager *p, struct region *r)
{
    struct uffdio_range range = {(uintptr_t)arena_address(p, r), (uint64_t)r->pages * p->page_bytes};
    ioctl(p->uffd, UFFDIO_WAKE, &range);
}
