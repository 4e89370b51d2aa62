/* Debug mode: poison, and the watch over a mapped file.
 *
 * [Note: watch]  The mapped-file device cannot see accesses to what is absent: the kernel serves them.
 * In debug mode it takes the rights to an absent region's addresses away. An access to it is then a
 * SIGSEGV; the handler, on the thread that made it, compares the file's bytes with the checksum and
 * gives the rights back, or ends the process. It reads the file by pread, which sees what the mapping
 * would show, so nobody reads a byte before it was compared. Whoever holds the lock touches no watched
 * memory and wants no other lock, so the handler may wait for it.
 */
#include "pager.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define POISON 0xff /* a NaN in every format of floats */
#define BUFFER (256u << 10)

/* Let nobody mistake what lies in a slot for content. */
void debug_poison(const struct pager *p, uint32_t slot)
{
    memset(p->base + (uint64_t)(p->arena_pages + slot) * p->page_bytes, POISON, p->page_bytes);
}

/* Checksum all bytes that leave, compare all that comes back, poison what is free. Before any region. */
API void pager_set_debug(struct pager *p)
{
    p->debug = 1;
}

/* See [Note: watch]. */

enum watched { NOBODYS = 0, OPEN, SHUT, OPENED }; /* OPENED: by an access that nobody announced */

struct watch {
    uint64_t base, page_bytes;
    uint32_t pages;
    int fd;
    uint32_t *first, *count; /* of each page's region; of each first page */
    uint64_t *sum;           /* of each first page */
    uint8_t *state;
    char *buffer;
    uint32_t lock;
    struct watch *next;
};

static struct watch *watches; /* never freed, as a handler may look; only emptied */
static struct sigaction before;

static void take(struct watch *w)
{
    while (__atomic_exchange_n(&w->lock, 1, __ATOMIC_ACQUIRE))
        sched_yield();
}

static void give(struct watch *w)
{
    __atomic_store_n(&w->lock, 0, __ATOMIC_RELEASE);
}

static int protect(struct watch *w, uint32_t page, uint32_t count, int rights)
{
    void *at = (void *)(uintptr_t)(w->base + page * w->page_bytes);
    return mprotect(at, count * w->page_bytes, rights) ? errno : 0;
}

/* The checksum of a region in the file; 0 or an errno. */
static int file_sum(struct watch *w, uint32_t page, uint32_t count, uint64_t *sum)
{
    uint64_t offset = page * w->page_bytes, end = offset + count * w->page_bytes;
    *sum = 0;
    while (offset < end) {
        uint64_t want = end - offset < BUFFER ? end - offset : BUFFER, done = 0;
        while (done < want) {
            ssize_t got = pread(w->fd, w->buffer + done, want - done, (off_t)(offset + done));
            if (got < 0 && errno == EINTR)
                continue;
            if (got <= 0)
                return got ? errno : EIO;
            done += (uint64_t)got;
        }
        *sum = sum_bytes(*sum, w->buffer, want);
        offset += want;
    }
    return 0;
}

/* Give the rights to a region back if its bytes are as they left; 0 or an errno. */
static int admit(struct watch *w, uint32_t page, uint8_t state)
{
    uint64_t sum;
    int error = 0;
    if (w->state[page] == SHUT) {
        error = file_sum(w, page, w->count[page], &sum);
        if (!error && sum != w->sum[page])
            error = EBADMSG;
        if (!error)
            error = protect(w, page, w->count[page], PROT_READ | PROT_WRITE);
    }
    if (!error)
        w->state[page] = state;
    return error;
}

static void say(const char *text)
{
    if (write(2, text, strlen(text)) < 0)
        return;
}

static void on_access(int number, siginfo_t *info, void *context)
{
    int saved = errno;
    uint64_t address = (uintptr_t)info->si_addr;
    for (struct watch *w = __atomic_load_n(&watches, __ATOMIC_SEQ_CST); w; w = w->next) {
        if (info->si_code != SEGV_ACCERR || address < w->base ||
            address - w->base >= w->pages * w->page_bytes)
            continue;
        take(w);
        uint32_t page = (uint32_t)((address - w->base) / w->page_bytes), head = w->first[page];
        int error = head ? admit(w, head - 1, OPENED) : EFAULT;
        give(w);
        if (error == EFAULT)
            say("dynoffload: access to memory of a region that was released. This is a bug: the "
                "process ends here.\n");
        else if (error == EBADMSG)
            say("dynoffload: the bytes of a region in the spill file are not those that were "
                "written, and an access that nobody announced needs them: check that disk, or pass "
                "spill_dir= another. The process ends here; the last saved checkpoint is not "
                "touched.\n");
        else if (error)
            say("dynoffload: a region cannot be read back from the spill file, and an access that "
                "nobody announced needs it: check that disk, or pass spill_dir= another. The "
                "process ends here; the last saved checkpoint is not touched.\n");
        if (error)
            abort();
        errno = saved;
        return;
    }
    errno = saved;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(number);
    else
        signal(number, SIG_DFL); /* and the access is repeated */
}

/* Watch over the mapping of `fd` at `base`, or NULL with `*error` set. */
API struct watch *watch_open(uint64_t base, uint64_t page_bytes, uint32_t pages, int fd, int *error)
{
    struct watch *w = calloc(1, sizeof *w);
    *error = ENOMEM;
    if (!w)
        return NULL;
    *w = (struct watch){.base = base, .page_bytes = page_bytes, .pages = pages, .fd = fd,
                        .first = calloc(pages, sizeof *w->first),
                        .count = calloc(pages, sizeof *w->count),
                        .sum = calloc(pages, sizeof *w->sum),
                        .state = calloc(pages, 1), .buffer = malloc(BUFFER)};
    struct sigaction now, ours = {.sa_sigaction = on_access, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (!w->first || !w->count || !w->sum || !w->state || !w->buffer ||
        (sigaction(SIGSEGV, NULL, &now) && (*error = errno))) {
        free(w->first), free(w->count), free(w->sum), free(w->state), free(w->buffer), free(w);
        return NULL;
    }
    if (now.sa_sigaction != on_access) {
        before = now;
        sigaction(SIGSEGV, &ours, NULL);
    }
    w->next = watches;
    __atomic_store_n(&watches, w, __ATOMIC_SEQ_CST);
    *error = 0;
    return w;
}

/* A region has begun; it has no content yet. */
API int watch_begin(struct watch *w, uint32_t page, uint32_t count)
{
    take(w);
    for (uint32_t i = 0; i < count; i++)
        w->first[page + i] = page + 1;
    w->count[page] = count;
    w->state[page] = OPEN;
    int error = protect(w, page, count, PROT_READ | PROT_WRITE);
    give(w);
    return error;
}

/* It is about to leave memory. */
API int watch_shut(struct watch *w, uint32_t page)
{
    int error = 0;
    take(w);
    if (w->state[page] != SHUT && !(error = protect(w, page, w->count[page], PROT_NONE))) {
        error = file_sum(w, page, w->count[page], &w->sum[page]);
        if (error)
            protect(w, page, w->count[page], PROT_READ | PROT_WRITE);
        else
            w->state[page] = SHUT;
    }
    give(w);
    return error;
}

/* It is about to be used. EBADMSG: its bytes are not those that left. */
API int watch_admit(struct watch *w, uint32_t page)
{
    take(w);
    int error = admit(w, page, OPEN);
    give(w);
    return error;
}

/* Its bytes count no more. */
API int watch_forget(struct watch *w, uint32_t page)
{
    take(w);
    w->state[page] = OPEN;
    int error = protect(w, page, w->count[page], PROT_READ | PROT_WRITE);
    give(w);
    return error;
}

/* It is no more, and nobody may use its addresses. */
API int watch_end(struct watch *w, uint32_t page)
{
    take(w);
    for (uint32_t i = 0; i < w->count[page]; i++)
        w->first[page + i] = 0;
    w->state[page] = NOBODYS;
    int error = protect(w, page, w->count[page], PROT_NONE);
    give(w);
    return error;
}

/* The mapping is about to go. */
API void watch_close(struct watch *w)
{
    take(w);
    w->pages = 0;
    give(w);
    free(w->first), free(w->count), free(w->sum), free(w->state), free(w->buffer);
}
