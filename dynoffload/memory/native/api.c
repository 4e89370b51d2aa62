/* What Python calls, through ctypes (which lets go of the interpreter's lock for each call). */
#include "pager.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

static void destroy(struct pager *p)
{
    pool_unmap(p);
    if (p->uffd >= 0)
        close(p->uffd);
    for (int i = 0; i < 2; i++)
        if (p->stop_pipe[i] >= 0)
            close(p->stop_pipe[i]);
    for (uint32_t i = 0; p->regions && i < p->region_capacity; i++)
        free(p->regions[i].slots);
    plan_clear(p);
    free(p->owner);
    free(p->full);
    free(p->vacant);
    free(p->regions);
    free(p->urgent);
    free(p->handed);
    free(p->events);
    free(p->workers);
    free(p);
}

/* 1 if the pager can work here with full rights, 2 in user mode only, else -errno. */
API int pager_probe(void)
{
    int user_mode_only, fd = fault_open(&user_mode_only);
    if (fd < 0)
        return fd;
    close(fd);
    return user_mode_only ? 2 : 1;
}

/* A new pager over `fd`, or NULL with `*error` set. Sizes are in pages of `page_bytes`. */
API struct pager *pager_open(int fd, uint64_t page_bytes, uint32_t arena_pages, uint32_t pool_pages,
                             uint32_t region_capacity, uint32_t workers, int record, int *error)
{
    struct pager *p = calloc(1, sizeof *p);
    if (!p) {
        *error = ENOMEM;
        return NULL;
    }
    int user_mode_only;
    *p = (struct pager){.page_bytes = page_bytes, .arena_pages = arena_pages,
                        .pool_pages = pool_pages, .region_capacity = region_capacity, .fd = fd,
                        .stop_pipe = {-1, -1}, .record = record};
    p->owner = calloc(arena_pages, sizeof *p->owner);
    p->full = calloc(pool_pages, sizeof *p->full);
    p->vacant = calloc(pool_pages, sizeof *p->vacant);
    p->regions = calloc(region_capacity, sizeof *p->regions);
    p->urgent = calloc(region_capacity, sizeof *p->urgent);
    p->handed = calloc(region_capacity, sizeof *p->handed);
    p->events = calloc(EVENT_CAPACITY, sizeof *p->events);
    p->workers = calloc(workers, sizeof *p->workers);
    p->uffd = fault_open(&user_mode_only);
    fault_prepare();
    *error = ENOMEM;
    if (!p->owner || !p->full || !p->vacant || !p->regions || !p->urgent || !p->handed ||
        !p->events || !p->workers)
        goto failed;
    if (p->uffd < 0) {
        *error = -p->uffd;
        goto failed;
    }
    if (pipe(p->stop_pipe)) {
        *error = errno;
        goto failed;
    }
    if ((*error = pool_map(p)))
        goto failed;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->hand, &monotonic);
    sigset_t all, before; /* signals belong to the interpreter's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    *error = pthread_create(&p->fault_thread, NULL, fault_serve, p);
    for (uint32_t i = 0; !*error && i < workers; i++)
        if (!(*error = pthread_create(&p->workers[i], NULL, transfer_worker, p)))
            p->worker_count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (*error)
        return NULL; /* no threads left on this system: leak rather than tear down half */
    return p;
failed:
    destroy(p);
    return NULL;
}

/* End the threads and unmap everything: no tensor may use the arena any more. */
API void pager_close(struct pager *p)
{
    pthread_mutex_lock(&p->mutex);
    p->stopping = 1;
    pthread_cond_broadcast(&p->work);
    pthread_cond_broadcast(&p->hand);
    while (p->serving) /* whoever is in pager_handed leaves before its memory goes */
        pthread_cond_wait(&p->done, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
    for (uint32_t i = 0; i < p->worker_count; i++)
        pthread_join(p->workers[i], NULL);
    if (write(p->stop_pipe[1], "", 1) != 1)
        abort();
    pthread_join(p->fault_thread, NULL);
    destroy(p);
}

API uint64_t pager_base(struct pager *p)
{
    return (uintptr_t)p->base;
}

API void pager_set_reserve(struct pager *p, uint32_t pages)
{
    pthread_mutex_lock(&p->mutex);
    p->reserve = pages;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
}

/* Give `id` its place; it has no content yet. */
API int pager_create(struct pager *p, uint32_t id, uint32_t page, uint32_t pages, uint64_t bytes,
                     int64_t offset)
{
    uint32_t *slots = calloc(pages, sizeof *slots);
    if (!slots)
        return ENOMEM;
    pthread_mutex_lock(&p->mutex);
    if (id >= p->region_high)
        p->region_high = id + 1;
    p->regions[id] = (struct region){.state = ABSENT, .page = page, .pages = pages, .bytes = bytes,
                                     .offset = offset, .slots = slots, .next_use = NEVER,
                                     .stamp = ++p->clock};
    for (uint32_t i = 0; i < pages; i++)
        p->owner[page + i] = id + 1;
    pthread_mutex_unlock(&p->mutex);
    return 0;
}

static void settle(struct pager *p, struct region *r)
{
    while (r->state == READING || r->state == WRITING || r->queued)
        pthread_cond_wait(&p->done, &p->mutex);
}

/* The content is not needed any more; the place stays. */
API void pager_discard(struct pager *p, uint32_t id)
{
    pthread_mutex_lock(&p->mutex);
    settle(p, &p->regions[id]);
    transfer_drop(p, id);
    p->regions[id].locked = p->regions[id].busy = p->regions[id].reported = 0;
    pthread_mutex_unlock(&p->mutex);
}

/* The region is no more. */
API void pager_release(struct pager *p, uint32_t id)
{
    pthread_mutex_lock(&p->mutex);
    struct region *r = &p->regions[id];
    settle(p, r);
    transfer_drop(p, id);
    for (uint32_t i = 0; i < r->pages; i++)
        p->owner[r->page + i] = 0;
    free(r->slots);
    *r = (struct region){.state = FREE, .next_use = NEVER};
    pthread_mutex_unlock(&p->mutex);
}

/* Wait until all of `ids` are at their addresses, holding them there by a pin each if `pin`.
 * 0, or an errno: EAGAIN if one is locked. */
API int pager_acquire(struct pager *p, const uint32_t *ids, uint32_t count, int pin)
{
    int error = 0;
    pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < count; i++) {
        struct region *r = &p->regions[ids[i]];
        r->pins++;
        r->stamp = ++p->clock;
        if (r->state == ABSENT && !r->has_copy && !r->queued && pager_room(p) >= r->pages) {
            pool_take_slots(p, r); /* new: nothing to read, nobody to ask */
            r->state = STAGED;
        }
        if (r->locked)
            error = EAGAIN;
        else if (r->state == STAGED && !error)
            error = transfer_install(p, ids[i]);
        else if (r->state != RESIDENT)
            transfer_want(p, ids[i]);
    }
    for (uint32_t i = 0; i < count && !error; i++) {
        struct region *r = &p->regions[ids[i]];
        while (r->state != RESIDENT && !error) {
            if (r->state == STAGED)
                error = transfer_install(p, ids[i]);
            else {
                transfer_want(p, ids[i]);
                pthread_cond_wait(&p->done, &p->mutex);
            }
        }
    }
    if (!pin || error)
        for (uint32_t i = 0; i < count; i++)
            p->regions[ids[i]].pins--;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
    return error;
}

API void pager_unpin(struct pager *p, const uint32_t *ids, uint32_t count)
{
    pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < count; i++)
        p->regions[ids[i]].pins--;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
}

/* Install what is staged already, wait for nothing. */
API void pager_touch(struct pager *p, const uint32_t *ids, uint32_t count)
{
    pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < count; i++) {
        struct region *r = &p->regions[ids[i]];
        r->stamp = ++p->clock;
        if (r->state == STAGED && !r->locked)
            transfer_install(p, ids[i]);
    }
    pthread_mutex_unlock(&p->mutex);
}

/* From now on an access to the region waits for its owner. */
API int pager_lock(struct pager *p, const uint32_t *ids, uint32_t count)
{
    int error = 0;
    pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < count && !error; i++) {
        struct region *r = &p->regions[ids[i]];
        settle(p, r);
        if (r->state == RESIDENT && !(error = pool_withdraw(p, r)))
            r->state = STAGED;
        r->locked = !error;
        r->reported = 0;
        r->told = 0;
    }
    pthread_mutex_unlock(&p->mutex);
    return error;
}

/* The owner has brought the regions up to date, or is about to under its own eyes. */
API void pager_unlock(struct pager *p, const uint32_t *ids, uint32_t count)
{
    pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < count; i++) {
        struct region *r = &p->regions[ids[i]];
        r->locked = 0;
        if (!r->reported)
            continue;
        r->reported = 0; /* somebody sleeps on it */
        if (r->state == RESIDENT)
            pool_wake(p, r);
        else if (r->state == STAGED)
            transfer_install(p, ids[i]);
        else
            transfer_want(p, ids[i]);
    }
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
}

/* The next locked region that somebody waits for; -1 after `timeout_s`, -2 when closing. */
API int64_t pager_handed(struct pager *p, double timeout_s)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)timeout_s;
    until.tv_nsec += (long)((timeout_s - (double)(time_t)timeout_s) * 1e9);
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    pthread_mutex_lock(&p->mutex);
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
    pthread_mutex_unlock(&p->mutex);
    return id;
}

/* Show a locked region's pages at arena page `page`, where nobody else looks. */
API int pager_show(struct pager *p, uint32_t id, uint32_t page)
{
    pthread_mutex_lock(&p->mutex);
    struct region *r = &p->regions[id];
    r->pins++;
    if (r->state == ABSENT)
        transfer_want(p, id);
    while (r->state != STAGED)
        pthread_cond_wait(&p->done, &p->mutex);
    transfer_end_wait(p, id);
    int error = pool_relocate(p, r, page, 0);
    pthread_mutex_unlock(&p->mutex);
    return error;
}

API int pager_hide(struct pager *p, uint32_t id, uint32_t page)
{
    pthread_mutex_lock(&p->mutex);
    struct region *r = &p->regions[id];
    int error = pool_relocate(p, r, page, 1);
    r->dirty = 1;
    r->pins--;
    pthread_mutex_unlock(&p->mutex);
    return error;
}

/* Follow a new plan from position 0. Uses are sorted by position. */
API int pager_plan(struct pager *p, const int64_t *action_position, const uint8_t *action_kind,
                   const uint32_t *action_region, uint32_t actions, const int64_t *use_position,
                   const uint32_t *use_region, uint32_t uses)
{
    uint32_t *last = malloc(sizeof *last * (p->region_capacity + 1));
    if (!last)
        return ENOMEM;
    pthread_mutex_lock(&p->mutex);
    plan_clear(p);
#define COPY(field, count)                                                                          \
    do {                                                                                            \
        p->field = malloc(sizeof *p->field * (count + 1));                                          \
        if (p->field)                                                                               \
            memcpy(p->field, field, sizeof *p->field * count);                                      \
    } while (0)
    COPY(action_position, actions);
    COPY(action_kind, actions);
    COPY(action_region, actions);
    COPY(use_position, uses);
    COPY(use_region, uses);
    p->use_next = malloc(sizeof *p->use_next * (uses + 1));
    int whole = p->action_position && p->action_kind && p->action_region && p->use_position &&
                p->use_region && p->use_next;
    if (whole) {
        p->actions = actions;
        p->uses = uses;
        memset(last, 0xff, sizeof *last * (p->region_capacity + 1));
        for (uint32_t i = uses; i-- > 0;) {
            p->use_next[i] = last[use_region[i]];
            last[use_region[i]] = i;
            p->regions[use_region[i]].next_use = use_position[i];
        }
        for (uint32_t i = 0; i < p->region_high; i++)
            p->regions[i].busy = 0; /* what could not move then may move now */
    }
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
    free(last);
    return whole ? 0 : ENOMEM;
}

API void pager_advance(struct pager *p, int64_t position)
{
    pthread_mutex_lock(&p->mutex);
    plan_advance(p, position);
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
}

/* State of each region: FREE..WRITING. */
API void pager_states(struct pager *p, uint8_t *states, uint32_t count)
{
    pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < count; i++)
        states[i] = i < p->region_high ? p->regions[i].state : FREE;
    pthread_mutex_unlock(&p->mutex);
}

API uint64_t pager_in_use(struct pager *p)
{
    pthread_mutex_lock(&p->mutex);
    uint64_t pages = p->counters.pages_in_use;
    pthread_mutex_unlock(&p->mutex);
    return pages;
}

API void pager_counters(struct pager *p, struct counters *counters)
{
    pthread_mutex_lock(&p->mutex);
    *counters = p->counters;
    p->counters.peak_pages = p->counters.pages_in_use;
    p->counters.error = 0; /* told once */
    pthread_mutex_unlock(&p->mutex);
}

/* Copy out and forget the events since the last call; how many there were. */
API uint32_t pager_events(struct pager *p, struct event *events)
{
    pthread_mutex_lock(&p->mutex);
    uint32_t count = p->event_count;
    memcpy(events, p->events, sizeof *events * count);
    p->event_count = 0;
    pthread_mutex_unlock(&p->mutex);
    return count;
}
