/* Transfers between slots and the spill file, and the threads that make them. */
#include "pager.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define IOV 256

double pager_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void transfer_record(struct pager *p, int kind, int cause, uint32_t region, double start, uint64_t bytes)
{
    if (!p->record)
        return;
    if (p->event_count == EVENT_CAPACITY) {
        p->counters.events_lost++;
        return;
    }
    p->events[p->event_count++] =
        (struct event){start, pager_now(), bytes, region, (uint16_t)kind, (uint16_t)cause};
}

/* Read or write all pages of a region; 0 or an errno. Called without the mutex. */
static int transfer_io(struct pager *p, struct region *r, int write)
{
    struct iovec iov[IOV];
    uint64_t page = p->page_bytes;
    for (uint32_t first = 0; first < r->pages;) {
        int n = 0;
        for (uint32_t i = first; i < r->pages && n < IOV; i++, n++) {
            char *slot = p->base + (uint64_t)(p->arena_pages + r->slots[i]) * page;
            iov[n] = (struct iovec){slot, page};
        }
        uint64_t want = (uint64_t)n * page, done = 0;
        int64_t offset = r->offset + (int64_t)((uint64_t)first * page);
        struct iovec *next = iov;
        while (done < want) {
            int left = n - (int)(next - iov);
            ssize_t got = write ? pwritev(p->fd, next, left, offset + (int64_t)done)
                                : preadv(p->fd, next, left, offset + (int64_t)done);
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0)
                return errno;
            if (got == 0)
                return EIO; /* past the end of a file that was allocated whole: it was truncated */
            done += (uint64_t)got;
            for (uint64_t rest = (uint64_t)got; rest;) {
                uint64_t step = rest < next->iov_len ? rest : next->iov_len;
                next->iov_base = (char *)next->iov_base + step;
                next->iov_len -= step;
                rest -= step;
                if (!next->iov_len)
                    next++;
            }
        }
        first += (uint32_t)n;
    }
    return 0;
}

static void begin_wait(struct pager *p, struct region *r)
{
    if (r->waited)
        return;
    r->waited = 1;
    r->waited_since = pager_now();
    if (p->waiting++ == 0)
        p->waiting_since = r->waited_since;
    p->counters.stalls++;
}

void transfer_end_wait(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    if (!r->waited)
        return;
    r->waited = 0;
    if (--p->waiting == 0)
        p->counters.stall_s += pager_now() - p->waiting_since;
    transfer_record(p, EVENT_STALL, BY_FAULT, id, r->waited_since, r->bytes);
}

/* Somebody waits for the region: it goes before all that is planned. */
void transfer_want(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    begin_wait(p, r);
    if (r->state == ABSENT && !r->queued) {
        r->queued = 1;
        p->urgent[p->urgent_tail++ % p->region_capacity] = id;
        pthread_cond_signal(&p->work);
    }
}

/* Put staged pages at their address. */
int transfer_install(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    int error = pool_install(p, r);
    for (int again = 0; error == EBUSY && r->waited && again < 100; again++)
        error = pool_install(p, r); /* the kernel migrates or scans the page just now */
    if (error && (r->waited || error != EBUSY)) {
        fprintf(stderr,
                "dynoffload: the kernel cannot move region %u into place: %s. A thread may be "
                "asleep on it, so the process ends here.\n",
                id, strerror(error));
        abort();
    }
    if (error)
        return error;
    r->state = RESIDENT;
    r->dirty = 1;
    r->stamp = ++p->clock;
    if (r->prefetched) {
        r->prefetched = 0;
        p->counters.used_bytes += r->bytes;
    }
    transfer_end_wait(p, id);
    return 0;
}

static void leave(struct pager *p, struct region *r)
{
    if (r->prefetched) {
        r->prefetched = 0;
        p->counters.wasted_bytes += r->bytes;
    }
    pool_free_slots(p, r);
    r->state = ABSENT;
}

/* Forget the pages of a region that is not in flight. */
void transfer_drop(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    if (r->state == RESIDENT) {
        if (pool_withdraw(p, r))
            abort(); /* a dying region whose pages are pinned by the kernel */
        r->state = STAGED;
    }
    if (r->state == STAGED)
        leave(p, r);
    r->dirty = 0;
    r->has_copy = 0;
    pthread_cond_signal(&p->work);
}

static void failed(struct pager *p, uint32_t id, int error)
{
    p->counters.error = error;
    p->counters.error_region = id;
}

/* Evict a region that is resident or staged. Drops the mutex while it writes. */
static void evict(struct pager *p, uint32_t id, int cause)
{
    struct region *r = &p->regions[id];
    if (r->state == RESIDENT) {
        if (pool_withdraw(p, r)) {
            r->busy = 1;
            return;
        }
        r->state = STAGED;
    }
    if (r->dirty || !r->has_copy) {
        double start = pager_now();
        r->state = WRITING;
        p->writing += r->pages;
        pthread_mutex_unlock(&p->mutex);
        int error = transfer_io(p, r, 1);
        pthread_mutex_lock(&p->mutex);
        p->writing -= r->pages;
        r->state = STAGED;
        if (error) { /* what could not be written stays; the owner is told */
            r->busy = 1;
            failed(p, id, error);
        } else {
            r->dirty = 0;
            r->has_copy = 1;
            p->counters.bytes_out += r->bytes;
            transfer_record(p, EVENT_EVICT, cause, id, start, r->bytes);
        }
    }
    if (r->waited && !r->locked)
        transfer_install(p, id);
    else if (!r->busy && !r->pins)
        leave(p, r);
    pthread_cond_broadcast(&p->done);
    pthread_cond_broadcast(&p->work);
}

/* Bring an absent region into slots, for which there is room. Drops the mutex while it reads. */
static void fetch(struct pager *p, uint32_t id, int cause)
{
    struct region *r = &p->regions[id];
    pool_take_slots(p, r);
    r->state = READING;
    if (r->has_copy) {
        double start = pager_now();
        int error = 0;
        pthread_mutex_unlock(&p->mutex);
        for (int attempt = 0; attempt < 3; attempt++)
            if (!(error = transfer_io(p, r, 0)))
                break;
        pthread_mutex_lock(&p->mutex);
        if (error) {
            failed(p, id, error);
            if (r->waited) {
                fprintf(stderr,
                        "dynoffload: cannot read %llu bytes of region %u back from the spill file: "
                        "%s. A thread needs them to go on, so the process ends here; the state of "
                        "the last saved checkpoint is not touched.\n",
                        (unsigned long long)r->bytes, id, strerror(error));
                abort();
            }
            r->state = STAGED;
            leave(p, r);
            pthread_cond_broadcast(&p->done);
            return;
        }
        p->counters.bytes_in += r->bytes;
        transfer_record(p, EVENT_FETCH, cause, id, start, r->bytes);
        if (cause == BY_PLAN) {
            r->prefetched = 1;
            p->counters.prefetched_bytes += r->bytes;
        }
    }
    r->state = STAGED;
    r->dirty = 0;
    r->stamp = ++p->clock;
    if (r->waited && !r->locked)
        transfer_install(p, id);
    pthread_cond_broadcast(&p->done);
    pthread_cond_broadcast(&p->work);
}

static int serve_urgent(struct pager *p)
{
    uint32_t id = p->urgent[p->urgent_head % p->region_capacity];
    struct region *r = &p->regions[id];
    if (r->state != ABSENT) {
        p->urgent_head++;
        r->queued = 0;
        pthread_cond_broadcast(&p->done);
        return 1;
    }
    if (pager_room(p) >= r->pages) {
        p->urgent_head++;
        r->queued = 0;
        fetch(p, id, BY_FAULT);
        return 1;
    }
    if (pager_room(p) + p->writing >= r->pages)
        return 0;
    uint32_t victim = plan_victim(p, p->position);
    if (victim == NO_REGION)
        victim = plan_victim(p, -1);
    if (victim == NO_REGION)
        return 0; /* all is pinned or in flight: somebody will let go */
    evict(p, victim, BY_ROOM);
    return 1;
}

void *transfer_worker(void *context)
{
    struct pager *p = context;
    pthread_mutex_lock(&p->mutex);
    while (!p->stopping) {
        uint32_t id;
        if (p->urgent_head != p->urgent_tail && serve_urgent(p))
            continue;
        int kind = p->urgent_head == p->urgent_tail ? plan_next(p, &id) : -1;
        if (kind == ACTION_FETCH)
            fetch(p, id, BY_PLAN);
        else if (kind == ACTION_EVICT)
            evict(p, id, BY_PLAN);
        else if (pager_room(p) + p->writing < p->reserve &&
                 (id = plan_victim(p, p->position)) != NO_REGION)
            evict(p, id, BY_ROOM);
        else
            pthread_cond_wait(&p->work, &p->mutex);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}
