/* Twins: regions that exchange contents; see [Note: twins]. */
#include "pager.h"

#include <errno.h>

/* Wait until its pages are in slots or it is absent, and end its waits; 0 or an errno. */
int region_put_aside(struct pager *p, uint32_t id)
{
    struct region *r = &p->regions[id];
    double since = pager_now(), patience = p->patience < MOVE_SURELY_S ? p->patience : MOVE_SURELY_S;
    int error;
    do {
        while (r->state == READING || r->state == WRITING || r->shown)
            pthread_cond_wait(&p->done, &p->mutex);
        if (r->waited || r->asleep || r->queued)
            transfer_unwant(p, id); /* sleeping accesses fault again */
        if (r->state != RESIDENT)
            return 0;
        error = pool_withdraw(p, r, MOVE_SOON_S);
    } while (error && pool_again(p, error, since, patience));
    if (!error)
        r->state = STAGED;
    return error;
}

/* Exchange the contents of each region and its twin. 0, or 1 with `*failure`: then none are. */
API int pager_exchange(struct pager *p, const uint32_t *ids, uint32_t count, const uint32_t *twins,
                       struct failure *failure)
{
    int failed = 0;
    HOLD(p);
    for (int at_rest = 0; !at_rest && !failed;) {
        at_rest = 1; /* unless one is installed while another is waited for */
        for (uint32_t i = 0; i < 2 * count && !failed; i++) {
            uint32_t id = i < count ? ids[i] : twins[i - count];
            struct region *r = &p->regions[id];
            if ((r->state == ABSENT || r->state == STAGED) && !r->shown && !r->queued && !r->asleep)
                continue;
            int error = region_put_aside(p, id);
            if (error)
                failed = fail(failure, FAILED_MOVE, error, id);
            at_rest = 0;
        }
    }
    for (uint32_t i = 0; i < count && !failed; i++) {
        struct region *a = &p->regions[ids[i]], *b = &p->regions[twins[i]], old = *a;
        a->state = b->state, b->state = old.state;
        a->slots = b->slots, b->slots = old.slots;
        a->offset = b->offset, b->offset = old.offset;
        a->source = b->source, b->source = old.source;
        a->extents = b->extents, b->extents = old.extents;
        a->dirty = b->dirty, b->dirty = old.dirty;
        a->has_copy = b->has_copy, b->has_copy = old.has_copy;
        a->clear = b->clear, b->clear = old.clear;
        a->cleared = b->cleared, b->cleared = old.cleared;
        a->sum = b->sum, b->sum = old.sum;
        a->hash = b->hash, b->hash = old.hash;
        a->hashed = b->hashed, b->hashed = old.hashed;
        a->prefetched = b->prefetched, b->prefetched = old.prefetched;
        a->stamp = b->stamp, b->stamp = old.stamp;
        a->next_use = b->next_use, b->next_use = old.next_use;
    }
    transfer_wake(p);
    return failed;
}
