/* Follows a plan: position, next uses, the next due transfer, the best victim. */
#include "pager.h"

#include <stdlib.h>
#include <string.h>

void plan_clear(struct pager *p)
{
    for (uint32_t i = 0; i < p->uses; i++)
        p->regions[p->use[i].region].next_use = NEVER;
    free(p->action);
    free(p->use);
    p->action = NULL;
    p->use = NULL;
    p->actions = p->next_action = p->uses = p->next_used = 0;
    p->position = 0;
}

/* Advance to `position`: uses before it are past, and next uses are updated. */
void plan_advance(struct pager *p, int64_t position)
{
    if (position < p->position) { /* moved back: count from the start */
        for (uint32_t i = p->uses; i-- > 0;)
            if (p->use[i].position >= position)
                p->regions[p->use[i].region].next_use = p->use[i].position;
        p->next_used = p->next_action = 0;
        while (p->next_action < p->actions && p->action[p->next_action].position < position)
            p->next_action++;
    }
    int back = position < p->position;
    p->position = position;
    for (; p->next_used < p->uses && p->use[p->next_used].position < position; p->next_used++) {
        const struct use *use = &p->use[p->next_used];
        if (!back)
            p->regions[use->region].next_use = use->next < 0 ? NEVER : p->use[use->next].position;
    }
}

/* Is it one of the regions that faulted last and are not planned? See [Note: operands]. Never
 * without a plan, where the least recently used region is evicted. */
static int faulted_last(const struct pager *p, const struct region *r)
{
    return p->next_used < p->uses && r->next_use == NEVER && r->fault &&
           p->served - r->fault < OPERANDS;
}

/* Would the plan have it back, and soon, or its eviction most likely take a write? See [Note: what
 * leaves first] in planning/lookahead.py. */
static int is_dear(const struct pager *p, const struct region *r)
{
    int clean = r->has_copy && r->same == SAME_BITS;
    return r->next_use != NEVER && !(clean && r->next_use - p->position > FAULT_LOOKAHEAD);
}

/* Is `a` evicted before `b`? The one that takes no write, then the one used later; among equals the
 * less recently used. */
static int leaves_first(const struct pager *p, const struct region *a, const struct region *b)
{
    int last = faulted_last(p, a);
    if (last != faulted_last(p, b))
        return !last;
    if (last)
        return a->fault < b->fault;
    int dear = is_dear(p, a);
    if (dear != is_dear(p, b))
        return !dear;
    return a->next_use > b->next_use || (a->next_use == b->next_use && a->stamp < b->stamp);
}

/* The first to evict of the evictable regions used after `later_than`; those that faulted last only
 * if it is negative. NO_REGION if there is none. See [Note: operands]. */
uint32_t plan_victim(struct pager *p, int64_t later_than)
{
    uint32_t best = NO_REGION;
    for (uint32_t i = 0; i < p->region_high; i++) {
        struct region *r = &p->regions[i];
        if ((r->state != RESIDENT && r->state != STAGED) || r->pins || r->waited || r->busy)
            continue;
        if (r->next_use <= later_than || (later_than >= 0 && faulted_last(p, r)))
            continue;
        if (best == NO_REGION || leaves_first(p, r, &p->regions[best]))
            best = i;
    }
    return best;
}

/* May a planned transfer start now? */
int plan_is_due(const struct pager *p)
{
    return p->next_action < p->actions && p->action[p->next_action].position <= p->position;
}

/* The next planned transfer that can start now: its kind and region, or -1. Skips obsolete ones. */
int plan_next(struct pager *p, uint32_t *region)
{
    while (plan_is_due(p)) {
        uint32_t id = (uint32_t)p->action[p->next_action].region;
        struct region *r = &p->regions[id];
        *region = id;
        if (p->action[p->next_action].kind == ACTION_EVICT) {
            p->next_action++;
            if ((r->state == RESIDENT || r->state == STAGED) && !r->pins && !r->waited && !r->busy &&
                r->next_use > p->position)
                return ACTION_EVICT;
            continue;
        }
        if (r->state != ABSENT || r->queued || r->next_use == NEVER || !r->has_copy) {
            p->next_action++;
            continue;
        }
        if (pager_room(p) >= r->pages + p->reserve) {
            p->next_action++;
            return ACTION_FETCH;
        }
        if (pager_room(p) + p->writing >= r->pages + p->reserve || r->next_use > p->position + 1)
            return -1; /* room is being made, or there is time to wait for it */
        *region = plan_victim(p, r->next_use);
        return *region == NO_REGION ? -1 : ACTION_EVICT;
    }
    return -1;
}
