/* Transfers between slots and the spill file, their queue, and the threads that make them. */
#include "pager.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Is the pool fuller than it may be, or than the reserve allows, with nothing on its way out? */
static int is_full(const struct pager *p)
{
    return pager_room(p) + p->writing < p->reserve || p->populated - p->retired > p->limit;
}

void transfer_wake(struct pager *p)
{
    if (p->urgent_head != p->urgent_tail || plan_is_due(p) || is_full(p))
        pthread_cond_signal(&p->work);
}

void transfer_record(struct pager *p, int kind, int cause, uint32_t region, double start, uint64_t bytes)
{
    if (p->event_count == EVENT_CAPACITY) {
        p->counters.events_lost++;
        return;
    }
    p->events[p->event_count++] =
        (struct event){start, pager_now(), bytes, region, (uint16_t)kind, (uint16_t)cause};
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
    r->waited = r->asleep = 0;
    if (--p->waiting == 0)
        p->counters.stall_s += pager_now() - p->waiting_since;
    transfer_record(p, EVENT_STALL, BY_FAULT, id, r->waited_since, r->bytes);
}

/* A thread waits for the region: queue it before all planned transfers. */
void transfer_want(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    begin_wait(p, r);
    if (r->state == ABSENT && !r->queued) {
        r->queued = 1;
        p->urgent[p->urgent_tail++ % p->region_capacity] = id;
        transfer_wake(p);
    }
}

/* End all waits for it. Accesses that sleep on it are repeated, and fault again. */
void transfer_unwant(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    if (r->queued) {
        uint32_t kept = p->urgent_head;
        for (uint32_t i = p->urgent_head; i != p->urgent_tail; i++) {
            uint32_t other = p->urgent[i % p->region_capacity];
            if (other != id)
                p->urgent[kept++ % p->region_capacity] = other;
        }
        p->urgent_tail = kept;
        r->queued = 0;
    }
    transfer_end_wait(p, id);
    r->asleep = 0;
    pool_wake(p, r);
    pthread_cond_broadcast(&p->done);
}

/* Fail the function calls that wait for the region. */
static void fail_waits(struct pager *p, uint32_t id, int kind, int error, uint32_t culprit)
{
    p->regions[id].failure = (struct failure){kind, error, culprit};
    transfer_unwant(p, id);
}

/* Put staged pages at their address. */
int transfer_install(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    int error = pool_install(p, r, r->asleep || r->waited || r->pins ? MOVE_SURELY_S : MOVE_SOON_S);
    if (error && r->asleep)
        pager_end("the kernel cannot move region %u, on which a thread sleeps, into place: %s", id,
                  strerror(error));
    if (error)
        return error;
    r->state = RESIDENT;
    r->dirty = 1;
    r->clear = 0;
    if (r->asleep)
        r->fault = ++p->served;
    r->asleep = 0;
    r->stamp = ++p->clock;
    p->progress++;
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
    p->progress++;
}

/* The pages are in slots: install them if a thread waits, else evict them if they may leave. */
static void finish_move(struct pager *p, uint32_t id, int may_leave)
{
    struct region *r = &p->regions[id];
    r->state = STAGED;
    if ((r->waited || r->asleep) && !r->locked)
        transfer_install(p, id);
    else if (may_leave && !r->pins)
        leave(p, r);
    pthread_cond_broadcast(&p->done);
    transfer_wake(p);
}

/* Move a region to slots, if it is at its address; 0 or an errno. */
static int withdraw(struct pager *p, struct region *r)
{
    int error = r->state == RESIDENT ? pool_withdraw(p, r, MOVE_SOON_S) : 0;
    if (!error && r->state == RESIDENT)
        r->state = STAGED;
    return error;
}

/* Discard the pages and content of a region that is not in flight. */
void transfer_drop(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    if (withdraw(p, r)) {
        if (pool_replace(p, r))
            pager_end("the kernel cannot take the pages of region %u back: %s", id, strerror(errno));
        r->state = STAGED;
    }
    if (r->state == STAGED)
        leave(p, r);
    r->dirty = r->has_copy = r->clear = r->cleared = 0;
    free(r->source);
    r->source = NULL;
    r->same = (uint8_t)(r->same << 1 & SAME_BITS);
    transfer_wake(p);
}

static void failed(struct pager *p, uint32_t id, int error, int is_write)
{
    p->counters.error = error;
    p->counters.error_region = id;
    p->counters.error_is_write = is_write;
}

/* Does every byte of a region that is in slots and in flight hold zero? Without the mutex. */
static int holds_zeros(struct pager *p, const struct region *r)
{
    for (uint32_t i = 0; i < r->pages; i++) {
        const char *slot = slot_address(p, r->slots[i]);
        if (*slot || memcmp(slot, slot + 1, p->page_bytes - 1))
            return 0;
    }
    return 1;
}

/* Write a region in slots and in flight, unless the file has the same: see [Note: dirtiness]. Without
 * the mutex. Returns whether it wrote; `*error` if it could not. */
static int write_back(struct pager *p, struct region *r, int *error)
{
    uint64_t sum = file_sum(p, r, 0), hash = 0;
    int alike = r->has_copy && sum == r->sum, hashes = alike || r->same;
    r->same = (uint8_t)((r->same << 1 | alike) & SAME_BITS);
    if (hashes)
        hash = file_sum(p, r, 1);
    if (alike && r->hashed && hash == r->hash)
        return 0;
    r->hashed = 0; /* a write that fails may leave the file between the two */
    *error = file_transfer(p, r, 1);
    if (!*error) {
        r->sum = sum;
        r->hash = hash;
        r->hashed = (uint8_t)hashes;
        free(r->source);
        r->source = NULL;
    }
    return 1;
}

/* Scan a cleared region in slots: if it holds zeros only, it is clear again, else write it back if
 * `writes`. Releases the mutex. Returns whether it was written; `*error` if it could not be. */
static int scan(struct pager *p, struct region *r, int writes, int *error)
{
    r->state = WRITING;
    p->moving++;
    pthread_mutex_unlock(&p->mutex);
    int zeros = r->cleared && holds_zeros(p, r);
    int wrote = !zeros && writes && write_back(p, r, error);
    pthread_mutex_lock(&p->mutex);
    p->moving--;
    r->clear = (uint8_t)zeros;
    if (zeros) {
        r->dirty = r->has_copy = 0;
    } else if (writes && !*error) {
        r->dirty = 0;
        r->has_copy = 1;
    }
    return wrote;
}

/* Evict a region that is resident or staged. Releases the mutex while it writes. */
static void evict(struct pager *p, uint32_t id, int cause)
{
    struct region *r = &p->regions[id];
    transfer_wake(p); /* see [Note: one worker] */
    if (withdraw(p, r)) {
        r->busy = 1;
        return;
    }
    if (r->dirty || !(r->has_copy || r->clear)) {
        double start = pager_now();
        int error = 0;
        p->writing += r->pages;
        int wrote = scan(p, r, 1, &error);
        p->writing -= r->pages;
        p->write_error = error;
        p->write_region = id;
        if (error) { /* it stays; `pager_counters` reports the error */
            r->busy = 1;
            failed(p, id, error, 1);
        } else if (wrote) {
            p->counters.bytes_out += r->bytes;
            transfer_record(p, EVENT_EVICT, cause, id, start, r->bytes);
        }
    }
    finish_move(p, id, !r->busy);
}

/* Does the region hold zeros only, as far as is known without reading the file? Releases the mutex
 * while it scans; drops the pages if it does. */
int transfer_is_clear(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    int error = 0;
    while (r->state == READING || r->state == WRITING)
        pthread_cond_wait(&p->done, &p->mutex);
    if (r->clear && !r->dirty)
        return 1;
    if (!r->cleared || r->locked || r->pins || r->shown || r->state == ABSENT || withdraw(p, r))
        return 0;
    scan(p, r, 0, &error);
    finish_move(p, id, r->clear);
    return r->clear;
}

/* Take slots, for which there is room, for a region without a copy. If it is clear, zero them with
 * the mutex released. */
void transfer_fill(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    pool_take_slots(p, r);
    if (r->clear) {
        r->state = READING;
        transfer_wake(p);
        p->moving++;
        pthread_mutex_unlock(&p->mutex);
        for (uint32_t i = 0; i < r->pages; i++)
            memset(slot_address(p, r->slots[i]), 0, p->page_bytes);
        pthread_mutex_lock(&p->mutex);
        p->moving--;
        pthread_cond_broadcast(&p->done);
    }
    r->state = STAGED;
    r->dirty = 0;
}

/* Fetch an absent region into slots, for which there is room. Releases the mutex while it reads. */
static void fetch(struct pager *p, uint32_t id, int cause)
{
    struct region *r = &p->regions[id];
    if (!r->has_copy) {
        transfer_fill(p, id);
    } else {
        pool_take_slots(p, r);
        r->state = READING;
        transfer_wake(p); /* see [Note: one worker] */
        double start = pager_now();
        int error = 0;
        p->moving++;
        pthread_mutex_unlock(&p->mutex);
        for (int attempt = 0; attempt < 3; attempt++)
            if (!(error = file_transfer(p, r, 0)))
                break;
        pthread_mutex_lock(&p->mutex);
        p->moving--;
        if (error && r->asleep)
            file_unread(r, id, error);
        if (error) {
            leave(p, r);
            if (r->waited)
                fail_waits(p, id, FAILED_READ, error, id);
            else
                failed(p, id, error, 0);
            return;
        }
        p->counters.bytes_in += r->bytes;
        transfer_record(p, EVENT_FETCH, cause, id, start, r->bytes);
        if (cause == BY_PLAN) {
            r->prefetched = 1;
            p->counters.prefetched_bytes += r->bytes;
        }
    }
    r->dirty = 0;
    r->stamp = ++p->clock;
    p->progress++;
    finish_move(p, id, 0);
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
        return 0; /* all is pinned or in flight: wait for an unpin or a transfer */
    evict(p, victim, BY_ROOM);
    return 1;
}

/* Called often; checks once a second. See [Note: no room]. */
void transfer_watch(struct pager *p)
{
    double now = pager_now();
    if (now - p->watched_at < 1.0)
        return;
    p->watched_at = now;
    if (p->urgent_head == p->urgent_tail || p->progress != p->watched) {
        p->watched = p->progress;
        p->stuck = 0;
        return;
    }
    struct region *first = &p->regions[p->urgent[p->urgent_head % p->region_capacity]];
    if (p->moving || pager_room(p) >= first->pages || plan_victim(p, -1) != NO_REGION) {
        pthread_cond_broadcast(&p->work); /* the workers can make progress */
        return;
    }
    p->stuck++;
    int out_of_patience = p->stuck > p->patience;
    for (uint32_t i = p->urgent_head; i != p->urgent_tail;) {
        uint32_t id = p->urgent[i % p->region_capacity];
        struct region *r = &p->regions[id];
        if (r->asleep && out_of_patience)
            pager_end("a thread sleeps until %llu bytes of region %u are in memory, but of the pool "
                      "of %llu bytes only %llu are free and nothing can leave: %s",
                      (unsigned long long)r->bytes, id,
                      (unsigned long long)(p->limit * p->page_bytes),
                      (unsigned long long)(pager_room(p) * p->page_bytes),
                      p->write_error ? strerror(p->write_error)
                                     : "all is in use at once; raise the budget");
        if (!r->asleep && p->write_error && p->stuck > 1)
            fail_waits(p, id, FAILED_WRITE, p->write_error, p->write_region);
        else if (!r->asleep && out_of_patience)
            fail_waits(p, id, FAILED_PINNED, EDEADLK, id);
        else
            i++;
    }
    for (uint32_t i = 0; i < p->region_high; i++)
        p->regions[i].busy = 0; /* retry failed evictions */
    transfer_wake(p);
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
        else if (is_full(p) && (id = plan_victim(p, p->position)) != NO_REGION)
            evict(p, id, BY_ROOM);
        else
            pthread_cond_wait(&p->work, &p->mutex);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}
