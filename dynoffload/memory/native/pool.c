/* The pool: one reservation of addresses, a fixed number of pages in it, and their moves. */
#include "pager.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
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
#define SYSTEM_PAGE ((uint64_t)sysconf(_SC_PAGESIZE))
#define PRESENT (1ull << 63) /* bits of /proc/self/pagemap */
#define SWAPPED (1ull << 62)
#define BACK_S 60.
#define HALF "the kernel has moved half of a region and refuses to move it on or back: %s"
#define POISON 0xff /* a NaN in every format of floats */

/* In debug mode, make the bytes of a free slot recognizable. */
static void poison(struct pager *p, uint32_t slot)
{
    if (p->debug)
        memset(slot_address(p, slot), POISON, p->page_bytes);
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

/* Does the page table hold a page at `address`, present or swapped out? -1 if it cannot be read. */
static int holds_page(struct pager *p, char *address)
{
    uint64_t entry;
    off_t at = (off_t)((uintptr_t)address / SYSTEM_PAGE * sizeof entry);
    if (pread(p->pagemap, &entry, sizeof entry, at) != sizeof entry)
        return -1;
    return (entry & (PRESENT | SWAPPED)) != 0;
}

/* Move `bytes`, or as many as possible within `patience_s`; how many in `*done`. */
static int move_span(struct pager *p, char *to, char *from, uint64_t bytes, double patience_s,
                     uint64_t *done)
{
    double since = 0;
    unsigned int attempt = 0;
    for (*done = 0; *done < bytes;) {
        char *there = to + *done, *here = from + *done;
        struct uffdio_move m = {.dst = (uintptr_t)there, .src = (uintptr_t)here,
                                .len = bytes - *done};
        if (ioctl(p->uffd, UFFDIO_MOVE, &m) == 0)
            break;
        int error = errno;
        if (m.move > 0) {
            *done += (uint64_t)m.move;
            attempt = 0;
            continue;
        }
        if (holds_page(p, here) == 0 && holds_page(p, there) == 1) { /* see [Note: moves] */
            struct uffdio_range range = {(uintptr_t)there, SYSTEM_PAGE};
            ioctl(p->uffd, UFFDIO_WAKE, &range);
            *done += SYSTEM_PAGE;
            attempt = 0;
            continue;
        }
        if (error != EAGAIN && error != EBUSY)
            return error;
        if (attempt++ == 0)
            since = pager_now();
        if (attempt < 50)
            continue;
        if (pager_now() - since > patience_s)
            return EBUSY;
        if (attempt % 50 == 0 && holds_page(p, here) == 1)
            madvise(here, SYSTEM_PAGE, MADV_POPULATE_WRITE); /* back from swap, and unshared */
        usleep(attempt < 1000 ? 50 : 1000);
    }
    *done = bytes;
    return 0;
}

/* Move `count` pages: all of them, or none and an errno. */
static int move_pages(struct pager *p, char *to, char *from, uint32_t count, double patience_s)
{
    uint64_t done, back;
    int error = move_span(p, to, from, count * p->page_bytes, patience_s, &done);
    if (error && done && move_span(p, from, to, done, BACK_S, &back))
        pager_end(HALF, strerror(error));
    return error;
}

/* Take slots of a kind, of which there are enough: the first that follow one another, as their pages
 * move as one; if there is no such run, the first. */
static void take_slots(struct pager *p, struct region *r, uint8_t kind)
{
    uint8_t *end = p->slot + p->populated, *from = p->slot;
    for (uint8_t *at = from; (at = memchr(at, kind, (size_t)(end - at)));) {
        uint32_t run = 1;
        while (run < r->pages && at + run < end && at[run] == kind)
            run++;
        if (run == r->pages) {
            from = at;
            break;
        }
        at += run;
    }
    for (uint32_t i = 0; i < r->pages; from++) {
        from = memchr(from, kind, (size_t)(end - from));
        *from = TAKEN;
        r->slots[i++] = (uint32_t)(from - p->slot);
    }
}

static void give_slots(struct pager *p, struct region *r, uint8_t kind)
{
    for (uint32_t i = 0; i < r->pages; i++)
        p->slot[r->slots[i]] = kind;
}

/* How many of a region's slots, from that of page `i` on, follow one another. */
static uint32_t run_from(const struct region *r, uint32_t i)
{
    uint32_t end = i + 1;
    while (end < r->pages && r->slots[end] == r->slots[end - 1] + 1)
        end++;
    return end - i;
}

int pool_install(struct pager *p, struct region *r, double patience_s)
{
    return pool_relocate(p, r, r->page, 0, patience_s);
}

int pool_withdraw(struct pager *p, struct region *r, double patience_s)
{
    return pool_relocate(p, r, r->page, 1, patience_s);
}

/* Move a region between slots and arena pages starting at `page`; all of it or nothing. */
int pool_relocate(struct pager *p, struct region *r, uint32_t page, int out, double patience_s)
{
    char *at = p->base + (uint64_t)page * p->page_bytes;
    uint32_t done = 0;
    int error = 0;
    if (out)
        take_slots(p, r, VACANT);
    for (uint32_t run; !error && done < r->pages; done += error ? 0 : run) {
        char *slot = slot_address(p, r->slots[done]), *place = at + done * p->page_bytes;
        run = run_from(r, done);
        error = move_pages(p, out ? slot : place, out ? place : slot, run, patience_s);
    }
    for (uint32_t i = 0, run; error && i < done; i += run) {
        char *slot = slot_address(p, r->slots[i]), *place = at + i * p->page_bytes;
        run = run_from(r, i);
        if (move_pages(p, out ? place : slot, out ? slot : place, run, BACK_S))
            pager_end(HALF, strerror(error));
    }
    if (!out == !error) /* nothing has left for these slots, or all of it came from them */
        give_slots(p, r, VACANT);
    if (error && !out)
        r->dirty = 1; /* pages that were in place for a moment may have been written */
    return error;
}

/* May a move that has failed with `error` be tried again? If so, releases the mutex for 5 ms. */
int pool_again(struct pager *p, int error, double since, double patience_s)
{
    if (error != EBUSY || pager_now() - since > patience_s)
        return 0;
    p->moving++; /* so that it does not count as stuck: see [Note: no room] */
    pthread_mutex_unlock(&p->mutex);
    usleep(5000);
    pthread_mutex_lock(&p->mutex);
    p->moving--;
    return 1;
}

/* Give a region that ends new pages, in slots. The kernel, which holds the old ones, keeps them. */
int pool_replace(struct pager *p, struct region *r)
{
    if (madvise(arena_address(p, r), (uint64_t)r->pages * p->page_bytes, MADV_DONTNEED))
        return errno;
    take_slots(p, r, VACANT);
    for (uint32_t i = 0; i < r->pages; i++) {
        struct uffdio_zeropage zero = {
            .range = {(uintptr_t)slot_address(p, r->slots[i]), p->page_bytes}};
        while (ioctl(p->uffd, UFFDIO_ZEROPAGE, &zero)) {
            if (errno != EAGAIN)
                return errno;
            if (zero.zeropage > 0) {
                zero.range.start += (uint64_t)zero.zeropage;
                zero.range.len -= (uint64_t)zero.zeropage;
            }
            zero.zeropage = 0;
        }
    }
    return 0;
}

/* Populate more slots, then register them: a read into an unpopulated slot would fault on itself. */
static void pool_grow(struct pager *p, uint32_t pages)
{
    uint32_t left = p->limit - (p->populated - p->retired), step = (uint32_t)(GROWTH_BYTES / p->page_bytes);
    uint32_t count = pages > step ? pages : step < left ? step : left;
    char *from = slot_address(p, p->populated);
    uint64_t bytes = (uint64_t)count * p->page_bytes;
    struct uffdio_register reg = {.range = {(uintptr_t)from, bytes},
                                  .mode = UFFDIO_REGISTER_MODE_MISSING};
    int error;
    do
        error = madvise(from, bytes, MADV_POPULATE_WRITE);
    while (error && (errno == EINTR || errno == EAGAIN));
    if (error || ioctl(p->uffd, UFFDIO_REGISTER, &reg))
        pager_end("the system refuses %llu bytes that the budget allows: %s. Lower the budget",
                  (unsigned long long)bytes, strerror(errno));
    for (uint32_t i = 0; i < count; i++)
        poison(p, p->populated + i);
    memset(p->slot + p->populated, FULL, count);
    p->fulls += count;
    p->populated += count;
}

/* Take as many slots as the region has pages; there is room for them. */
void pool_take_slots(struct pager *p, struct region *r)
{
    if (p->fulls < r->pages)
        pool_grow(p, r->pages - p->fulls);
    take_slots(p, r, FULL);
    p->fulls -= r->pages;
    uint64_t used = p->populated - p->retired - p->fulls;
    p->counters.pages_in_use = used;
    if (used > p->counters.peak_pages)
        p->counters.peak_pages = used;
}

void pool_free_slots(struct pager *p, struct region *r)
{
    for (uint32_t i = 0; i < r->pages; i++)
        poison(p, r->slots[i]);
    give_slots(p, r, FULL);
    p->fulls += r->pages;
    p->counters.pages_in_use = p->populated - p->retired - p->fulls;
    pool_retire(p);
}

void pool_retire(struct pager *p)
{
    while (p->fulls && p->populated - p->retired > p->limit) {
        uint8_t *slot = memrchr(p->slot, FULL, p->populated);
        if (madvise(slot_address(p, (uint32_t)(slot - p->slot)), p->page_bytes, MADV_DONTNEED))
            return;
        *slot = VACANT;
        p->fulls--;
        p->retired++;
    }
}

void pool_wake(struct pager *p, struct region *r)
{
    struct uffdio_range range = {(uintptr_t)arena_address(p, r), (uint64_t)r->pages * p->page_bytes};
    ioctl(p->uffd, UFFDIO_WAKE, &range);
}
