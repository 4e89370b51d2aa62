/* Reads and writes regions in the spill file; compares what is read with the checksum of its write.
 *
 * [Note: checksums]  In debug mode the checksum covers all bytes of a region. Otherwise it covers the
 * first word of every sector, as file systems and disks lose, or return stale, whole sectors. A stale
 * sector with the same first word is not detected.
 */
#include "pager.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define IOV 256 /* most pages per call */

#define SECTOR 512u
#define LANES 8 /* as many products as a core has in flight */

/* The checksum of a region whose pages are in slots, or its hash: the checksum of all its words. See
 * [Note: checksums]. Each step maps what came before, and the next word, one to one; the shift
 * lets a sign, the highest bit, reach more bits than one. */
uint64_t file_sum(const struct pager *p, const struct region *r, int whole)
{
    uint64_t lane[LANES], step = whole || p->debug ? 1 : SECTOR / 8, sum = 0;
    for (int j = 0; j < LANES; j++)
        lane[j] = (uint64_t)j;
    for (uint32_t i = 0; i < r->pages; i++) {
        const uint64_t *words = (const uint64_t *)slot_address(p, r->slots[i]);
        for (uint64_t at = 0; at < p->page_bytes / 8; at += LANES * step)
            for (int j = 0; j < LANES; j++) {
                uint64_t h = lane[j] ^ words[at + (uint64_t)j * step];
                lane[j] = (h ^ h >> 32) * 0x9e3779b97f4a7c15ull;
            }
    }
    for (int j = 0; j < LANES; j++)
        sum = (sum ^ lane[j]) * 0xff51afd7ed558ccdull, sum ^= sum >> 32;
    return sum;
}

/* Move bytes `at` to `end` of a region from or to `offset` of a file. */
static int move_bytes(struct pager *p, struct region *r, uint64_t at, uint64_t end, int fd,
                      int64_t offset, int write)
{
    struct iovec iov[IOV];
    uint64_t page = p->page_bytes;
    for (offset -= (int64_t)at; at < end;) {
        int n = 0;
        for (uint64_t from = at; from < end && n < IOV; from += iov[n++].iov_len) {
            uint64_t skip = from % page, left = end - from;
            iov[n] = (struct iovec){slot_address(p, r->slots[from / page]) + skip,
                                    left < page - skip ? left : page - skip};
        }
        ssize_t got = write ? pwritev(fd, iov, n, offset + (int64_t)at)
                            : preadv(fd, iov, n, offset + (int64_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno;
        if (got == 0)
            return EIO; /* the file was truncated, as all of it had been allocated */
        at += (uint64_t)got;
    }
    return 0;
}

/* 0 if the file of an extent is as it was opened, else an errno; see [Note: sources]. */
static int check_source(const struct extent *e)
{
    struct stat now;
    if (fstat(e->fd, &now))
        return errno;
    int64_t modified_ns = now.st_mtim.tv_sec * 1000000000l + now.st_mtim.tv_nsec;
    return now.st_size == e->size && modified_ns == e->modified_ns ? 0 : ESTALE;
}

/* Read a region from its source, and zero what is left of its last page; see [Note: sources]. */
static int read_source(struct pager *p, struct region *r)
{
    uint64_t at = 0, page = p->page_bytes;
    for (uint32_t i = 0; i < r->extents; i++) {
        const struct extent *e = &r->source[i];
        int error = check_source(e);
        if (!error)
            error = move_bytes(p, r, at, at + (uint64_t)e->bytes, e->fd, e->offset, 0);
        if (error)
            return error;
        at += (uint64_t)e->bytes;
    }
    if (at % page)
        memset(slot_address(p, r->slots[at / page]) + at % page, 0, page - at % page);
    if (r->hashed)
        return 0;
    r->sum = file_sum(p, r, 0);
    r->hash = file_sum(p, r, 1);
    r->hashed = 1;
    return 0;
}

/* Read or write all pages of a region; 0 or an errno. Called without the mutex. */
int file_transfer(struct pager *p, struct region *r, int write)
{
    uint64_t end = r->pages * p->page_bytes;
    int error = !write && r->source ? read_source(p, r)
                                    : move_bytes(p, r, 0, end, p->fd, r->offset, write);
    if (error)
        return error;
    return write || file_sum(p, r, 0) == r->sum ? 0 : EBADMSG;
}

/* End the process, as a thread sleeps on a region that cannot be read: name the file, of several
 * the first that has changed, or else the last. */
void file_unread(const struct region *r, uint32_t id, int error)
{
    char link[32], path[4096] = "the spill file";
    if (r->source) {
        uint32_t at = 0;
        while (at + 1 < r->extents && !check_source(&r->source[at]))
            at++;
        snprintf(link, sizeof link, "/proc/self/fd/%d", r->source[at].fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        path[length < 0 ? 0 : length] = 0;
    }
    pager_end("cannot read %llu bytes of region %u, for which a thread sleeps, from %s: %s%s",
              (unsigned long long)r->bytes, id, path,
              error == EBADMSG  ? "its bytes are not those that were written"
              : error == ESTALE ? "it has changed since the block began"
                                : strerror(error),
              r->source ? ". Leave the files of a model alone while a block reads them, and begin again"
                        : "");
}
