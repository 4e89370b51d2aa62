"""C library calls on raw addresses, and others that Python does not expose."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library. Its functions run without the GIL; see `ctypes.get_errno`."""
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


def check(result: int) -> None:
    """Raise `OSError` from the C library's errno if ``result`` is not 0."""
    if result:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def map_memory(nbytes: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE, flags: int = 0) -> int:
    """Return the address of new private, anonymous memory.

    Raises:
        OSError: the kernel refuses, as for lack of memory or of address space.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags
    address = libc().mmap(None, nbytes, prot, kind, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        check(-1)
    return int(address)
