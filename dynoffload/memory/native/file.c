/* Regions in the spill file, and checksums of what is written, to be compared with what comes back.
 *
 * [Note: checksums]  In debug mode all bytes of a region count. Otherwise the first word of every
 * sector does: what a file system or a disk loses, or gives back as it was before, is whole sectors.
 * A stale sector whose first word is what it was is not told from the right one.
 */
#include "pager.h"

#include <errno.h>
#include <sys/uio.h>

#define IOV 256 /* pages of one call */

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
static uint64_t sum_of(const struct pager *p, const struct region *r)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < r->pages; i++) {
        const char *slot = p->base + (uint64_t)(p->arena_pages + r->slots[i]) * p->page_bytes;
        sum = (p->debug ? sum_bytes : sample)(sum, slot, p->page_bytes);
    }
    return sum;
}

/* What is not what was written is refused. */
static int compare(struct pager *p, struct region *r, int write)
{
    uint64_t sum = sum_of(p, r);
    if (write)
        r->sum = sum;
    return sum == r->sum ? 0 : EBADMSG;
}

/* Read or write all pages of a region; 0 or an errno. Called without the mutex. */
int file_transfer(struct pager *p, struct region *r, int write)
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
    return compare(p, r, write);
}
