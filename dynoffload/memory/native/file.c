/* Reads and writes regions in the spill file; compares what is read with the checksum of its write.
 *
 * [Note: checksums]  In debug mode the checksum covers all bytes of a region. Otherwise it covers the
 * first word of every sector, as file systems and disks lose, or return stale, whole sectors. A stale
 * sector with the same first word is not detected.
 */
#include "pager.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_cachestat /* headers older than Linux 6.5 */
#define SYS_cachestat 451
#endif

#define IOV 256 /* most pages per call */

#define ALIGN 4096 /* of direct reads */
#define PIECE (2 << 20)
#define LONG (1 << 20) /* shorter extents are read faster through the page cache */

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

/* Does the page cache hold all of an extent, or may nobody tell, who may not write the file? */
static int is_cached(const struct extent *e)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = (uint64_t)e->offset / page;
    uint64_t range[2] = {(uint64_t)e->offset, (uint64_t)e->bytes}, count[5] = {0};
    if (syscall(SYS_cachestat, e->fd, range, count, 0))
        return errno == EPERM;
    return count[0] > (uint64_t)(e->offset + e->bytes - 1) / page - first;
}

/* Read an extent to byte `at` of a region, past the page cache. */
static int read_direct(struct pager *p, struct region *r, uint64_t at, const struct extent *e)
{
    int64_t end = e->offset + e->bytes, from = e->offset & ~(int64_t)(ALIGN - 1), done = e->offset;
    char *piece = aligned_alloc(ALIGN, PIECE);
    int error = piece ? 0 : ENOMEM;
    while (!error && done < end) {
        int64_t left = (end - from + ALIGN - 1) & ~(int64_t)(ALIGN - 1);
        ssize_t got = pread(e->direct, piece, left < PIECE ? (size_t)left : PIECE, from);
        if (got < 0) {
            error = errno == EINTR ? 0 : errno;
            continue;
        }
        int64_t stop = from + got < end ? from + got : end;
        if (stop <= done)
            error = EIO; /* the file was truncated */
        while (done < stop) {
            uint64_t to = at + (uint64_t)(done - e->offset), skip = to % p->page_bytes;
            uint64_t n = p->page_bytes - skip;
            n = n < (uint64_t)(stop - done) ? n : (uint64_t)(stop - done);
            memcpy(slot_address(p, r->slots[to / p->page_bytes]) + skip, piece + (done - from), n);
            done += (int64_t)n;
        }
        from = done & ~(int64_t)(ALIGN - 1);
    }
    free(piece);
    return error;
}

/* Read a region from its source, and zero what is left of its last page; see [Note: sources]. */
static int read_source(struct pager *p, struct region *r)
{
    uint64_t at = 0, page = p->page_bytes;
    for (uint32_t i = 0; i < r->extents; i++) {
        const struct extent *e = &r->source[i];
        int error = check_source(e);
        if (error)
            return error;
        error = EINVAL; /* as a file system may say of direct reads */
        if (e->direct >= 0 && e->bytes >= LONG && !is_cached(e))
            error = read_direct(p, r, at, e);
        if (error == EINVAL)
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
    char link[32], path[4096] = "the spill file", number[32];
    const char *name = number;
    snprintf(number, sizeof number, "region %u", id);
    if (r->source) {
        name = (const char *)(r->source + r->extents);
        uint32_t at = 0;
        while (at + 1 < r->extents && !check_source(&r->source[at]))
            at++;
        snprintf(link, sizeof link, "/proc/self/fd/%d", r->source[at].fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        path[length < 0 ? 0 : length] = 0;
    }
    pager_end("cannot read %llu bytes of %s, for which a thread sleeps, from %s: %s%s",
              (unsigned long long)r->bytes, name, path,
              error == EBADMSG  ? "its bytes are not those that were written"
              : error == ESTALE ? "it has changed since the block began"
                                : strerror(error),
              r->source ? ". Leave the files of a model alone while a block reads them, and begin again"
                        : "");
}
