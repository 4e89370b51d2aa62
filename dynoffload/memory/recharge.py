"""Charging memory to the control group that this process is in now, where it lies.

The kernel charges a page to the group of whoever touches it first, and leaves it there when the
process moves to another group. So what a process had before it joined a group is outside of that
group's limit, and is never paged for its sake. `recharge` gives a range new pages with the same
content: copied out piece by piece, given back, and written anew. Addresses, and with them all
tensors and views, stay. Nobody else may touch the range meanwhile.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

from dynoffload.units import MiB

_PIECE = 4 * MiB
_DONTNEED = 4
_libc = ctypes.PyDLL(None, use_errno=True)  # these calls keep the interpreter's lock
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p


def recharge(ranges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Give ranges of memory new pages, charged to the group that this process is in.

    Args:
        ranges: address and bytes of each; whole pages inside of it are charged anew.

    Returns:
        The bytes that were, and those that were left as they are: of files, shared, or locked.
    """
    private = _Private()
    buffer = ctypes.create_string_buffer(_PIECE)
    done = left = 0
    for address, nbytes in ranges:
        for start, end in _pieces(address, nbytes):
            if private.has(start, end) and _renew(start, end - start, buffer):
                done += end - start
            else:
                left += end - start
    return done, left


def _pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of pieces that are whole pages."""
    page = mmap.PAGESIZE
    start, end = -(-address // page) * page, (address + nbytes) // page * page
    while start < end:
        piece = min(_PIECE, end - start)
        yield start, start + piece
        start += piece


def _renew(address: int, nbytes: int, buffer: ctypes.Array[ctypes.c_char]) -> bool:
    _libc.memcpy(buffer, address, nbytes)
    if _libc.madvise(address, nbytes, _DONTNEED):
        return False  # it is locked, and nothing was given back
    _libc.memcpy(address, buffer, nbytes)
    return True


class _Private:
    """The parts of this process's memory that are its own: of no file, and not shared."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            place, rights, _, _, inode, *_ = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in place.split("-"))
            if rights.startswith("rw") and rights[3] == "p" and inode == "0":
                if self._ends and self._ends[-1] == start:
                    self._ends[-1] = end
                else:
                    self._starts.append(start)
                    self._ends.append(end)

    def has(self, start: int, end: int) -> bool:
        """Return whether all of it is."""
        index = bisect.bisect_right(self._starts, start) - 1
        return index >= 0 and end <= self._ends[index]
