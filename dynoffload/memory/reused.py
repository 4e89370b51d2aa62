"""Memory that is filled anew in every step, such as gradients, without what fresh memory costs.

What it is: `reused`, which gives memory for a tensor, and takes it back when the last tensor over
it is gone. What it is not: an account, or a cache that keeps memory from others.

[Note: lazily]  The allocator of C maps large blocks one by one and unmaps them as they are freed,
so the kernel hands every page out, cleared, in each step again; for gradients of large experts
that can be a fifth of the step. Here a block that comes back is freed lazily (`MADV_FREE`): the
kernel may take its pages whenever memory is short, without writing them anywhere, and counts them
as available; those that it has not taken by then are written again without its doing. The resident
set shows them until it has.

[Note: most]  More is never mapped than was in use at one time.

[Note: watched]  Where a mode or torch's profiler watches what is allocated, which would not see
these blocks, memory is torch's own. So it is while a session is open (`suspended`), which places
gradients itself, and in whose budget pages that the kernel has not taken yet would be.

torch cannot resize such a tensor, as it cannot one over an array of numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dynoffload.units import MiB

_MADV_FREE = 8  # of Linux
_FAILED = ctypes.c_void_p(-1).value
_OWN = 32 * MiB  # from here on glibc maps a block by itself


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_int64)
    libc.munmap.argtypes = (address, size)
    libc.madvise.argtypes = (address, size, number)
    return libc


def _map(nbytes: int) -> int | None:
    """Return the address of new memory, None if there is none."""
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int | None = _libc().mmap(None, nbytes, access, kind, -1, 0)
    return None if address == _FAILED else address


class Blocks:
    """Blocks of memory, in use or back; see [Note: lazily] and [Note: most].

    A block comes back by a finalizer, which may run in the midst of anything, in any thread: so
    coming back takes no lock, and is entered in the books by the next who takes one.

    Attributes:
        idle: blocks that are back, as address and bytes; the oldest first.
        used: bytes in use.
        most: that were in use at one time.
    """

    def __init__(self) -> None:
        self.idle: list[tuple[int, int]] = []
        self.used = self.most = 0
        self._there: set[int] = set()  # addresses of blocks in use
        self._came: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Any:
        """Return a buffer of so many bytes with any content, or None if there is no memory.

        The block comes back once nothing holds the buffer any more.
        """
        with self._lock:
            self._settle()
            address = self._found(nbytes)
            if address is None:
                address = self._fresh(nbytes)
            if address is None:
                return None
            self.used += nbytes
            self.most = max(self.most, self.used)
        self._there.add(address)
        buffer = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(buffer, self._free, address, nbytes).atexit = False
        return buffer

    def forked(self) -> None:
        """This is a child process: nobody else takes a block."""
        self._lock = threading.Lock()

    def has(self, address: int) -> bool:
        """Return whether a block in use begins there."""
        return address in self._there

    def _free(self, address: int, nbytes: int) -> None:
        """Take a block back; each operation on what is shared is one that nothing interrupts."""
        self._there.discard(address)
        _libc().madvise(address, nbytes, _MADV_FREE)  # a kernel without it keeps the pages
        self._came.append((address, nbytes))

    def _settle(self) -> None:
        """Enter in the books what came back."""
        while self._came:
            block = self._came.popleft()
            self.used -= block[1]
            self.idle.append(block)

    def _found(self, nbytes: int) -> int | None:
        """Return the block of that size that came back last."""
        for at in range(len(self.idle) - 1, -1, -1):
            if self.idle[at][1] == nbytes:
                return self.idle.pop(at)[0]
        return None

    def _fresh(self, nbytes: int) -> int | None:
        """Return a new block, for which old ones of other sizes make room."""
        most = max(self.most, self.used + nbytes)
        while self.idle and self.used + sum(size for _, size in self.idle) + nbytes > most:
            _libc().munmap(*self.idle.pop(0))
        return _map(nbytes)


BLOCKS = Blocks()
"""Of this process."""

# A thread that is not in the child may have had the lock.
os.register_at_fork(after_in_child=lambda: BLOCKS.forked())


def is_reused(storage: torch.UntypedStorage) -> bool:
    """Return whether memory is that of `reused`, which nobody has but who has the storage."""
    return storage.device.type == "cpu" and BLOCKS.has(storage.data_ptr())


_suspensions: list[None] = []  # one for each block of `suspended`


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Have `reused` give torch's own memory in the block, on all threads."""
    _suspensions.append(None)
    try:
        yield
    finally:
        _suspensions.pop()


def _watched() -> bool:
    mode = _get_current_dispatch_mode() is not None
    return mode or bool(_suspensions) or torch._C._autograd._profiler_enabled()


def reused(like: torch.Tensor) -> torch.Tensor:
    """Return what `torch.empty_like` returns, over memory that is used again.

    It is `torch.empty_like` for what is on another device than the CPU, has less than 32 MiB or
    gaps, on another system than Linux, and where somebody watches; see [Note: watched].
    """
    plain = like.device.type == "cpu" and like.nbytes >= _OWN and sys.platform == "linux"
    if plain and not _watched():
        form = torch.empty_like(like, device="meta")
        nbytes = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if form.untyped_storage().nbytes() == like.nbytes:
            buffer = BLOCKS.take(nbytes)
            if buffer is not None:
                flat = torch.frombuffer(buffer, dtype=torch.uint8, count=like.nbytes)
                storage = flat.untyped_storage()  # no larger than the tensor, as torch's own are
                made = torch.empty(0, dtype=like.dtype)
                return made.set_(storage, 0, form.shape, form.stride())
    return torch.empty_like(like)
