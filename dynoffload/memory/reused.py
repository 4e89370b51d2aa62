"""Memory that is filled anew in every step, such as gradients, without what fresh memory costs.

[Note: lazily]  The allocator of C maps large blocks one by one and unmaps them as they are freed,
so the kernel hands every page out, cleared, in each step again. For gradients of large experts that
can be a fifth of the step. Here a block that comes back is freed lazily (`MADV_FREE`): the kernel
takes its pages when memory is short, without writing them anywhere, and counts them as available.
Pages that it has not taken are written again without its doing. The resident set shows them until
it has.

[Note: watched]  Where a mode or torch's profiler watches what is allocated, which would not see
these blocks, memory is torch's own. So it is while a session is open (`suspended`): a session
places gradients itself, and pages that the kernel has not taken yet would be in its budget.

torch cannot resize such a tensor, as it cannot one over an array of numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dynoffload.memory.libc import libc, map_memory
from dynoffload.units import MiB

_MADV_FREE = 8  # of Linux
_OWN = 32 * MiB  # from here on glibc maps a block by itself


class Blocks:
    """Blocks of memory, each of which serves tensors of one size; see [Note: lazily].

    A block comes back by a finalizer, which may run in the midst of anything, in any thread. So
    there is no lock: each operation on what is shared is one that nothing interrupts.

    Attributes:
        idle: addresses of blocks that are back, by their size.
        used: addresses of blocks in use.
    """

    def __init__(self) -> None:
        self.idle: dict[int, list[int]] = {}
        self.used: set[int] = set()

    def take(self, nbytes: int) -> Any:
        """Return a buffer of so many bytes with any content, or None if there is no memory.

        The block comes back once nothing holds the buffer any more.
        """
        try:
            address = self.idle[nbytes].pop()
        except (KeyError, IndexError):
            try:
                address = map_memory(nbytes)
            except OSError:
                return None
        self.used.add(address)
        buffer = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(buffer, self._free, address, nbytes).atexit = False
        return buffer

    def _free(self, address: int, nbytes: int) -> None:
        self.used.discard(address)
        libc().madvise(address, nbytes, _MADV_FREE)  # a kernel without it keeps the pages
        self.idle.setdefault(nbytes, []).append(address)


BLOCKS = Blocks()
"""Of this process."""


def is_reused(storage: torch.UntypedStorage) -> bool:
    """Return whether memory is that of `reused`, which nobody has but who has the storage."""
    return storage.device.type == "cpu" and storage.data_ptr() in BLOCKS.used


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
