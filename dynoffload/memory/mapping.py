"""The spill file as memory: a shared mapping, fetched and dropped by request (Linux).

Each call works on one range of the file, a multiple of the system's page, and releases the GIL.

[Note: whole pages]  The kernel reads ahead of an access by a window that may be larger than a
region, and so fills memory unnecessarily. With 2 MiB pages the mapping requests huge pages and
random access together: then exactly the 2 MiB around an access are read, in one large folio.
Whether kernel and file system do so is probed at the start. Where they do not, regions are
requested by their exact range (WILLNEED) before they are mapped.

[Note: no content]  A range without content is kept unwritten in the file (ZERO_RANGE): its dirty
pages are dropped without a write, and its next use needs no read.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

import torch

from dynoffload.memory.libc import check, libc, map_memory
from dynoffload.units import KiB, MiB

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_NORMAL, _RANDOM, _DONTNEED, _DONTFORK, _HUGEPAGE, _DONTDUMP = 0, 1, 4, 10, 14, 16
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # Linux 5.14
_SYNC_WAIT_WRITE_WAIT = 7
_ZERO_RANGE_KEEP_SIZE = 0x10 | 0x01
_CACHESTAT = 451  # Linux 6.5
_WILLNEED_BYTES = 128 * KiB  # the kernel may truncate a longer request
_HUGE = 2 * MiB
_UNKNOWN = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})


class _CacheStat(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writing", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


class Mapping:
    """``nbytes`` of addresses over the file ``fd``; the file may be shorter and grow.

    Args:
        fd: a file opened for reading and writing, without O_DIRECT, of at least one page's size.
        nbytes: addresses to take.
        page_bytes: all ranges begin and end at multiples of it.

    Raises:
        OSError: the system refuses the mapping.
    """

    def __init__(self, fd: int, nbytes: int, page_bytes: int) -> None:
        self._fd, self._page = fd, page_bytes
        self._nbytes = nbytes + _HUGE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        # Reserve addresses first, then map the file at an aligned one.
        self._room = map_memory(self._nbytes, 0, _MAP_NORESERVE)  # PROT_NONE
        self.address = -(-self._room // _HUGE) * _HUGE
        shared = mmap.MAP_SHARED | _MAP_NORESERVE | _MAP_FIXED
        try:
            if libc().mmap(self.address, nbytes, protection, shared, fd, 0) != self.address:
                check(-1)
            self._advise(0, nbytes, _DONTFORK)  # a child's write would reach this file
            self._advise(0, nbytes, _DONTDUMP)
        except OSError:
            self.close()
            raise
        self.whole_pages = page_bytes % _HUGE == 0 and self._reads_whole_pages(nbytes)

    def _reads_whole_pages(self, nbytes: int) -> bool:
        """Probe whether [Note: whole pages] works here, on the file's first page."""
        try:
            self._advise(0, nbytes, _HUGEPAGE)
            self._advise(0, nbytes, _RANDOM)
            self._touch(0, mmap.PAGESIZE)
            exact = self.cached(0, self._page) == self._page
        except OSError:
            exact = False
        self.drop(0, self._page)
        if not exact:
            self._advise(0, nbytes, _NORMAL)
        return exact

    def _advise(self, offset: int, nbytes: int, advice: int) -> None:
        _repeated(libc().madvise, self.address + offset, nbytes, advice)

    def _populate(self, offset: int, nbytes: int, advice: int) -> None:
        try:
            self._advise(offset, nbytes, advice)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._touch(offset, nbytes)

    def _touch(self, offset: int, nbytes: int) -> None:
        """Read one byte of each page, on systems without POPULATE."""
        memory = (ctypes.c_char * nbytes).from_address(self.address + offset)
        torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].sum()

    def fetch(self, offset: int, nbytes: int) -> None:
        """Read a range into memory.

        Raises:
            OSError: the file cannot be read.
        """
        self._ask(offset, nbytes)
        self._populate(offset, nbytes, _POPULATE_READ)

    def create(self, offset: int, nbytes: int) -> None:
        """Allocate memory for a range without content, ready to be written.

        Raises:
            OSError: the file cannot be written.
        """
        self._ask(offset, nbytes)
        self._populate(offset, nbytes, _POPULATE_WRITE)

    def _ask(self, offset: int, nbytes: int) -> None:
        """Request exactly this range, where an access would read more."""
        if not self.whole_pages:
            for start in range(offset, offset + nbytes, _WILLNEED_BYTES):
                length = min(_WILLNEED_BYTES, offset + nbytes - start)
                os.posix_fadvise(self._fd, start, length, os.POSIX_FADV_WILLNEED)

    def write_back(self, offset: int, nbytes: int) -> None:
        """Write the dirty pages of a range and wait until they are written.

        The file's metadata is not synced, as the file is never opened again.

        Raises:
            OSError: the file cannot be written.
        """
        try:
            flags = _SYNC_WAIT_WRITE_WAIT
            return _repeated(libc().sync_file_range, self._fd, offset, nbytes, flags)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
        _repeated(libc().msync, self.address + offset, nbytes, 4)  # MS_SYNC

    def drop(self, offset: int, nbytes: int) -> None:
        """Release a range's clean pages, in this process and in the page cache."""
        self._advise(offset, nbytes, _DONTNEED)
        os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def forget(self, offset: int, nbytes: int) -> None:
        """Release a range's pages and discard their content; see [Note: no content]."""
        try:
            check(libc().fallocate(self._fd, _ZERO_RANGE_KEEP_SIZE, offset, nbytes))
        except OSError:  # some file systems cannot, or not always
            self.write_back(offset, nbytes)
            self.drop(offset, nbytes)

    def clear(self, offset: int, nbytes: int) -> None:
        """Write zeros to a range of which `forget` has left bytes in the file.

        Raises:
            OSError: the write failed.
        """
        ctypes.memset(self.address + offset, 0, nbytes)
        self.write_back(offset, nbytes)
        self.drop(offset, nbytes)

    def holds_data(self, offset: int, nbytes: int) -> bool:
        """Return whether a range may hold written data; unwritten bytes read as zeros."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA) < offset + nbytes
        except OSError as error:
            return error.errno != errno.ENXIO  # no data from there on

    def cached(self, offset: int, nbytes: int) -> int:
        """Return how many bytes of a range are in memory, requested or read ahead."""
        found = self._stat(offset, nbytes)
        if found is not None:
            return int(found.cached) * mmap.PAGESIZE
        pages = torch.empty(-(-nbytes // mmap.PAGESIZE), dtype=torch.uint8)
        check(libc().mincore(self.address + offset, nbytes, pages.data_ptr()))
        return int((pages & 1).sum()) * mmap.PAGESIZE

    def touched(self, offset: int, nbytes: int) -> bool:
        """Return whether pages of a dropped range have been in memory since; pages reclaimed by
        the kernel are reported from Linux 6.5 on."""
        found = self._stat(offset, nbytes)
        return bool(self.cached(offset, nbytes) if found is None else found.cached + found.evicted)

    def modified(self, offset: int, nbytes: int) -> int:
        """Return how many bytes of a range are not yet written; all of them if unknown."""
        found = self._stat(offset, nbytes)
        return nbytes if found is None else int(found.dirty + found.writing) * mmap.PAGESIZE

    def _stat(self, offset: int, nbytes: int) -> _CacheStat | None:
        span = (ctypes.c_uint64 * 2)(offset, nbytes)
        found = _CacheStat()
        number = ctypes.c_long(_CACHESTAT)
        try:
            check(libc().syscall(number, self._fd, span, ctypes.byref(found), 0))
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
            return None
        return found

    def close(self) -> None:
        """Unmap the addresses."""
        libc().munmap(self._room, self._nbytes)


def _repeated(call: Callable[..., int], *arguments: int) -> None:
    """Call a function of the C library again for as long as a signal cuts it off."""
    while True:
        try:
            return check(call(*arguments))
        except OSError as error:
            if error.errno not in (errno.EINTR, errno.EAGAIN):
                raise
