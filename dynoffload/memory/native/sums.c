/* Checksums of what is written, to be compared with what comes back.
 *
 * [Note: checksums]  In debug mode all bytes of a region count. Otherwise the first word of every
 * sector does: what a file system or a disk loses, or gives back as it was before, is whole sectors.
 * A stale sector whose first word is what it was is not told from the right one.
 */
#include "pager.h"

#define SECTOR 512u

static uint64_t sum_bytes(uint64_t sum, const void *bytes, uint64_t nbytes)
{
    const uint64_t *words = bytes;
    uint64_t lane[4] = {sum, sum + 1, sum + 2, sum + 3};
    for (uint64_t i = 0; i + 4 <= nbytes / 8; i += 4)
        for (int j = 0; j < 4; j++) {
            uint64_t h = (lane[j] ^ words[i + j]) * 0x9e3779b97f4a7c15ull;
            lane[j] = h ^ (h >> 29);
        }
    for (int j = 0; j < 4; j++)
        sum = (sum ^ lane[j]) * 0xff51afd7ed558ccdull, sum ^= sum >> 32;
    return sum;
}

static uint64_t sample(uint64_t sum, const void *bytes, uint64_t nbytes)
{
    const uint64_t *words = bytes;
    for (uint64_t i = 0; i < nbytes / 8; i += SECTOR / 8) {
        uint64_t h = (sum ^ words[i]) * 0x9e3779b97f4a7c15ull;
        sum = h ^ (h >> 29);
    }
    return sum;
}

/* The checksum of a region whose pages are in slots. See [Note: checksums]. */
uint64_t sum_of(const struct pager *p, const struct region *r)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < r->pages; i++) {
        const char *slot = p->base + (uint64_t)(p->arena_pages + r->slots[i]) * p->page_bytes;
        sum = (p->debug ? sum_bytes : sample)(sum, slot, p->page_bytes);
    }
    return sum;
}
