/* The functions that Python calls through ctypes, which releases the GIL during each call. */
#include "pager.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

API uint64_t pager_base(struct pager *p)
{
    return (uintptr_t)p->base;
}

API void pager_set_reserve(struct pager *p, uint32_t pages)
{
    HOLD(p);
    p->reserve = pages;
    transfer_wake(p);
}

/* Let the pool have no more than `pages`, as soon as so many others are free; never more than before. */
API void pager_limit(struct pager *p, uint32_t pages)
{
    HOLD(p);
    if (pages < p->limit)
        p->limit = pages;
    pool_retire(p);
    transfer_wake(p);
}

/* How many seconds to wait for room when nothing can be evicted, see [Note: no room]; and, if that is
 * less, for a page that the kernel holds. */
API void pager_set_patience(struct pager *p, uint32_t seconds)
{
    HOLD(p);
    p->patience = seconds;
}

/* Give `id` its place; it has no content yet. */
API int pager_create(struct pager *p, uint32_t id, uint32_t page, uint32_t pages, uint64_t bytes,
                     int64_t offset)
{
    uint32_t *slots = calloc(pages, sizeof *slots);
    if (!slots)
        return ENOMEM;
    HOLD(p);
    if (id >= p->region_high)
        p->region_high = id + 1;
    p->regions[id] = (struct region){.state = ABSENT, .page = page, .pages = pages, .bytes = bytes,
                                     .offset = offset, .slots = slots, .next_use = NEVER,
                                     .same = SAME_BITS, .stamp = ++p->clock,
                                     .locks = (uint32_t)p->clock};
    for (uint32_t i = 0; i < pages; i++)
        p->owner[page + i] = id + 1;
    return 0;
}

/* Wait until no transfer uses its pages, and end all waits for it. */
static struct region *settle(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    while (r->state == READING || r->state == WRITING || r->shown)
        pthread_cond_wait(&p->done, &p->mutex);
    transfer_unwant(p, id);
    return r;
}

static void forget(struct pager *p, uint32_t id)
{
    struct region *r = settle(p, id);
    transfer_drop(p, id);
    r->locked = r->busy = r->reported = 0;
    gil_release_unlocked(p);
    pthread_cond_broadcast(&p->done);
}

/* Discard the content; the region remains. */
API void pager_discard(struct pager *p, uint32_t id)
{
    HOLD(p);
    forget(p, id);
}

/* Set the content to zeros; see [Note: clear regions]. */
API void pager_clear(struct pager *p, const uint32_t *ids, uint32_t count)
{
    HOLD(p);
    for (uint32_t i = 0; i < count; i++) {
        forget(p, ids[i]);
        p->regions[ids[i]].clear = p->regions[ids[i]].cleared = 1;
    }
}

/* Answer for each cleared region whether it still holds zeros only. */
API void pager_is_clear(struct pager *p, const uint32_t *ids, uint32_t count, uint8_t *answers)
{
    HOLD(p);
    for (uint32_t i = 0; i < count; i++)
        answers[i] = (uint8_t)transfer_is_clear(p, ids[i]);
}

/* Let the content be that of `extents` of other files, as many bytes as the region has; see
 * [Note: sources]. Messages call it `name`. */
API int pager_source(struct pager *p, uint32_t id, const struct extent *extents, uint32_t count,
                     const char *name)
{
    struct extent *source = malloc(sizeof *source * count + strlen(name) + 1);
    if (!source)
        return ENOMEM;
    memcpy(source, extents, sizeof *source * count);
    strcpy((char *)(source + count), name);
    HOLD(p);
    forget(p, id);
    struct region *r = &p->regions[id];
    r->source = source;
    r->extents = count;
    r->has_copy = 1;
    r->hashed = 0;
    return 0;
}

/* Is its copy in other files? */
API int pager_sourced(struct pager *p, uint32_t id)
{
    HOLD(p);
    return p->regions[id].source != NULL;
}

/* End the region. */
API void pager_release(struct pager *p, uint32_t id)
{
    HOLD(p);
    struct region *r = &p->regions[id];
    settle(p, id);
    for (uint32_t i = 0; i < r->pages; i++)
        p->owner[r->page + i] = 0;
    forget(p, id);
    free(r->slots);
    *r = (struct region){.state = FREE, .next_use = NEVER};
}

/* Wait until the region is at its address; 1 with `*failure` if it cannot be. */
static int make_resident(struct pager *p, uint32_t id, struct failure *failure)
{
    struct region *r = &p->regions[id];
    while (r->state != RESIDENT) {
        if (r->locked || r->state == FREE)
            return fail(failure, FAILED_LOCKED, r->locked ? EAGAIN : EINVAL, id);
        if (r->failure.kind) {
            *failure = r->failure;
            return 1;
        }
        if (r->state == STAGED) {
            int error = transfer_install(p, id);
            if (error)
                return fail(failure, FAILED_MOVE, error, id);
            continue;
        }
        transfer_want(p, id);
        pthread_cond_wait(&p->done, &p->mutex);
    }
    return r->locked ? fail(failure, FAILED_LOCKED, EAGAIN, id) : 0;
}

/* Wait until all of `ids` are at their addresses, holding them there by a pin each if `pin`.
 * 0, or 1 with `*failure`. */
API int pager_acquire(struct pager *p, const uint32_t *ids, uint32_t count, int pin,
                      struct failure *failure)
{
    int failed = 0;
    HOLD(p);
    for (uint32_t i = 0; i < count; i++) {
        struct region *r = &p->regions[ids[i]];
        r->pins++;
        r->stamp = ++p->clock;
        r->failure.kind = 0;
        if (r->state == ABSENT && !r->has_copy && !r->queued && pager_room(p) >= r->pages) {
            transfer_fill(p, ids[i]); /* new: nothing to read */
        }
    }
    for (uint32_t i = 0; i < count; i++)
        if (!p->regions[ids[i]].locked && p->regions[ids[i]].state == ABSENT)
            transfer_want(p, ids[i]); /* all at once */
    for (uint32_t i = 0; i < count && !failed; i++)
        failed = make_resident(p, ids[i], failure);
    for (uint32_t i = 0; i < count && (!pin || failed); i++) {
        struct region *r = &p->regions[ids[i]];
        if (r->pins) /* else it was released meanwhile */
            r->pins--;
        if (failed && !r->pins && !r->asleep && r->queued)
            transfer_unwant(p, ids[i]);
    }
    if (!pin || failed)
        p->progress++;
    transfer_wake(p);
    return failed;
}

API void pager_unpin(struct pager *p, const uint32_t *ids, uint32_t count)
{
    HOLD(p);
    for (uint32_t i = 0; i < count; i++)
        p->regions[ids[i]].pins--;
    p->progress++;
    transfer_wake(p);
}

/* Install regions that are staged already; wait for nothing. */
API void pager_touch(struct pager *p, const uint32_t *ids, uint32_t count)
{
    HOLD(p);
    for (uint32_t i = 0; i < count; i++) {
        struct region *r = &p->regions[ids[i]];
        r->stamp = ++p->clock;
        if (r->state == STAGED && !r->locked)
            transfer_install(p, ids[i]);
    }
}

static void unlock(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    r->locked = 0;
    if (!r->reported)
        return;
    r->reported = 0; /* a thread sleeps on it */
    r->asleep = 1;
    if (r->state == RESIDENT) {
        r->asleep = 0;
        pool_wake(p, r);
    } else if (r->state == STAGED)
        transfer_install(p, id);
    else
        transfer_want(p, id);
}

/* Allow accesses again: the owner has updated the regions, or is about to do so itself. */
API void pager_unlock(struct pager *p, const uint32_t *ids, uint32_t count)
{
    HOLD(p);
    for (uint32_t i = 0; i < count; i++)
        unlock(p, ids[i]);
    gil_release_unlocked(p);
    transfer_wake(p);
}

/* Make accesses to the regions wait for their owner: to all of them, or to none if one cannot be
 * withdrawn. 0, or 1 with `*failure`. */
API int pager_lock(struct pager *p, const uint32_t *ids, uint32_t count, struct failure *failure)
{
    int error = 0;
    HOLD(p);
    for (uint32_t i = 0; i < count; i++) {
        struct region *r = &p->regions[ids[i]];
        error = region_put_aside(p, ids[i]);
        if (error) {
            fail(failure, FAILED_MOVE, error, ids[i]);
            while (i-- > 0)
                unlock(p, ids[i]);
            gil_release_unlocked(p);
            transfer_wake(p);
            break;
        }
        r->locked = 1;
        r->locks++;
        r->reported = 0;
        r->told = 0;
    }
    transfer_wake(p);
    return error != 0;
}

/* The next locked region that a thread waits for; -1 after `timeout_s`, -2 when closing. */
API int64_t pager_handed(struct pager *p, double timeout_s)
{
    double end = pager_now() + timeout_s;
    struct timespec until = {(time_t)end, (long)((end - (double)(time_t)end) * 1e9)};
    HOLD(p);
    p->serving++;
    int64_t id = -1;
    while (!p->stopping && p->handed_head == p->handed_tail)
        if (pthread_cond_timedwait(&p->hand, &p->mutex, &until) == ETIMEDOUT)
            break;
    if (p->stopping)
        id = -2;
    else if (p->handed_head != p->handed_tail) {
        id = p->handed[p->handed_head++ % p->region_capacity];
        p->handed_since = pager_now();
    }
    p->serving--;
    pthread_cond_broadcast(&p->done);
    return id;
}

/* Show a locked region's pages at arena page `page`, its alias. 0, or 1 with `*failure`: it is not
 * shown then. */
API int pager_show(struct pager *p, uint32_t id, uint32_t page, struct failure *failure)
{
    int failed = 0, error;
    HOLD(p);
    struct region *r = &p->regions[id];
    r->pins++;
    r->failure.kind = 0;
    while (r->state != STAGED && !failed) {
        if (r->failure.kind) {
            *failure = r->failure;
            failed = 1;
        } else if (r->state == RESIDENT) {
            failed = fail(failure, FAILED_LOCKED, EINVAL, id);
        } else {
            transfer_want(p, id);
            pthread_cond_wait(&p->done, &p->mutex);
        }
    }
    if (!failed && (error = pool_relocate(p, r, page, 0, MOVE_SURELY_S)))
        failed = fail(failure, FAILED_MOVE, error, id);
    transfer_end_wait(p, id);
    if (failed)
        r->pins--;
    else
        r->shown = 1;
    return failed;
}

API void pager_hide(struct pager *p, uint32_t id, uint32_t page)
{
    HOLD(p);
    struct region *r = &p->regions[id];
    double since = pager_now();
    int error;
    do
        error = pool_relocate(p, r, page, 1, MOVE_SOON_S);
    while (error && pool_again(p, error, since, PATIENCE));
    if (error)
        pager_end("the kernel cannot bring region %u back to its place: %s", id, strerror(error));
    r->dirty = 1;
    r->clear = 0;
    r->shown = 0;
    r->pins--;
    p->progress++;
    pthread_cond_broadcast(&p->done);
}

/* Follow a new plan from position 0. Uses are sorted by position. */
API int pager_plan(struct pager *p, const struct action *action, uint32_t actions,
                   const struct use *use, uint32_t uses)
{
    uint32_t *last = calloc(p->region_capacity + 1, sizeof *last); /* one past a region's last use */
    HOLD(p);
    plan_clear(p);
    p->action = malloc(sizeof *action * (actions + 1));
    p->use = malloc(sizeof *use * (uses + 1));
    int whole = last && p->action && p->use;
    if (whole) {
        memcpy(p->action, action, sizeof *action * actions);
        memcpy(p->use, use, sizeof *use * uses);
        p->actions = actions;
        p->uses = uses;
        for (uint32_t i = uses; i-- > 0;) {
            p->use[i].next = (int64_t)last[use[i].region] - 1;
            last[use[i].region] = i + 1;
            p->regions[use[i].region].next_use = use[i].position;
        }
        for (uint32_t i = 0; i < p->region_high; i++)
            p->regions[i].busy = 0; /* retry failed moves */
    }
    transfer_wake(p);
    free(last);
    return whole ? 0 : ENOMEM;
}

API void pager_advance(struct pager *p, int64_t position)
{
    HOLD(p);
    plan_advance(p, position);
    transfer_wake(p);
}

/* State of each region, FREE..WRITING, and its number of pins. */
API void pager_states(struct pager *p, uint8_t *states, uint32_t *pins, uint32_t count)
{
    HOLD(p);
    for (uint32_t i = 0; i < count; i++) {
        states[i] = i < p->region_high ? p->regions[i].state : FREE;
        pins[i] = i < p->region_high ? p->regions[i].pins : 0;
    }
}

/* The totals. With `reset` the peak begins again, and the error is cleared once reported. */
API void pager_counters(struct pager *p, struct counters *counters, int reset)
{
    HOLD(p);
    *counters = p->counters;
    counters->pages_taken = p->populated - p->retired;
    if (reset) {
        p->counters.peak_pages = p->counters.pages_in_use;
        p->counters.error = 0;
    }
}

/* Copy and clear the events since the last call; returns their number. */
API uint32_t pager_events(struct pager *p, struct event *events)
{
    HOLD(p);
    uint32_t count = p->event_count;
    memcpy(events, p->events, sizeof *events * count);
    p->event_count = 0;
    return count;
}
