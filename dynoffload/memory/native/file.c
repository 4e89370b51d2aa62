/* Reads and writes regions in the spill file; compares what is read with the checksum of its write.
 *
 * [Note: checksums]  In debug mode the checksum covers all bytes of a region. Otherwise it covers the
 * first word of every sector, as file systems and disks lose, or return stale, whole sectors. A stale
 * sector with the same first word is not detected.
 */
#include "pager.h"

#include <errno.h>
#include <sys/uio.h>

#define IOV 256 /* most pages per call */

#define SECTOR 512u
#define LANES 8 /* as many products as a core has in flight */

/* The checksum of a region whose pages are in slots, or its hash: the checksum of all its words. See
 * [Note: checksums]. Each step maps what came before, and the next word, one to one. */
uint64_t file_sum(const struct pager *p, const struct region *r, int whole)
{
    uint64_t lane[LANES], step = whole || p->debug ? 1 : SECTOR / 8, sum = 0;
    for (int j = 0; j < LANES; j++)
        lane[j] = (uint64_t)j;
    for (uint32_t i = 0; i < r->pages; i++) {
        const uint64_t *words = (const uint64_t *)slot_address(p, r->slots[i]);
        for (uint64_t at = 0; at < p->page_bytes / 8; at += LANES * step)
            for (int j = 0; j < LANES; j++) {
                uint64_t h = (lane[j] ^ words[at + (uint64_t)j * step]) * 0x9e3779b97f4a7c15ull;
                lane[j] = h << 29 | h >> 35;
            }
    }
    for (int j = 0; j < LANES; j++)
        sum = (sum ^ lane[j]) * 0xff51afd7ed558ccdull, sum ^= sum >> 32;
    return sum;
}

/* Read or write all pages of a region; 0 or an errno. Called without the mutex. */
int file_transfer(struct pager *p, struct region *r, int write)
{
    struct iovec iov[IOV];
    uint64_t page = p->page_bytes, end = r->pages * page;
    for (uint64_t at = 0; at < end;) {
        int n = 0;
        uint64_t skip = at % page; /* of a page that was transferred in part */
        for (uint64_t i = at / page; i < r->pages && n < IOV; i++, skip = 0)
            iov[n++] = (struct iovec){slot_address(p, r->slots[i]) + skip, page - skip};
        ssize_t got = write ? pwritev(p->fd, iov, n, r->offset + (int64_t)at)
                            : preadv(p->fd, iov, n, r->offset + (int64_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno;
        if (got == 0)
            return EIO; /* the file was truncated, as all of it had been allocated */
        at += (uint64_t)got;
    }
    return write || file_sum(p, r, 0) == r->sum ? 0 : EBADMSG;
}
