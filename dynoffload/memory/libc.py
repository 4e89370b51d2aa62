"""C library calls that Python does not expose."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library; a call releases the GIL, and `ctypes.get_errno` returns its errno."""
    found = ctypes.CDLL(None, use_errno=True)
    address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    found.mmap.restype = address
    found.mmap.argtypes = (address, size, number, number, number, offset)
    found.munmap.argtypes = (address, size)
    found.madvise.argtypes = (address, size, number)
    found.msync.argtypes = (address, size, number)
    found.mincore.argtypes = (address, size, address)
    found.sync_file_range.argtypes = (number, offset, offset, ctypes.c_uint)
    found.fallocate.argtypes = (number, number, offset, offset)
    found.syscall.restype = ctypes.c_long
    return found


def check(answer: int) -> None:
    """Raise the `OSError` for errno unless a call returned 0."""
    if answer:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def map_memory(nbytes: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE, flags: int = 0) -> int:
    """Return the address of new private, anonymous memory.

    Raises:
        OSError: the system has no memory left.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags
    address = libc().mmap(None, nbytes, access, kind, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        check(-1)
    return int(address)
