/* Debug mode: free slots are poisoned; all bytes are checksummed (sums.c). */
#include "pager.h"

#include <string.h>

#define POISON 0xff /* a NaN in every format of floats */

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
