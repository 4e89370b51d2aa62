"""Reuses large CPU buffers, such as gradients, across steps to avoid the cost of page faults.

[Note: lazily]  malloc maps large blocks one by one and unmaps them when they are freed, so the
kernel faults in and zeroes every page again in each step. For gradients of large experts that can
be a fifth of the step. Here a returned block is freed lazily (`MADV_FREE`): the kernel reclaims its
pages when memory is short, without writing them anywhere, and counts them as available. Pages not
reclaimed are reused without a fault. They count in the resident set until they are reclaimed.

[Note: watched]  While a dispatch mode or torch's profiler is active, memory is torch's own, as they
would not see these blocks. The same holds while a session is open (`suspended`): a session places
gradients itself, and pages not yet reclaimed would count in its budget.

torch cannot resize such a tensor, as with a tensor over a numpy array.
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

_MADV_FREE = 8  # on Linux
_OWN = 32 * MiB  # glibc maps blocks of at least this size one by one


class Blocks:
    """Memory blocks, each reused for buffers of one size; see [Note: lazily].

    A finalizer returns a block, and may run at any point in any thread. So there is no lock: each
    operation on shared state is atomic.

    Attributes:
        idle: addresses of returned blocks, by size.
        used: addresses of blocks in use.
    """

    def __init__(self) -> None:
        self.idle: dict[int, list[int]] = {}
        self.used: set[int] = set()

    def take(self, nbytes: int) -> Any:
        """Return an uninitialized buffer of ``nbytes``, or None if there is no memory.

        The block is returned once the buffer has no reference left.
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
        libc().madvise(address, nbytes, _MADV_FREE)  # kernels without it keep the pages
        self.idle.setdefault(nbytes, []).append(address)


BLOCKS = Blocks()
"""The blocks of this process."""


def is_reused(storage: torch.UntypedStorage) -> bool:
    """Return whether ``storage`` is a reused block, which only this storage owns."""
    return storage.device.type == "cpu" and storage.data_ptr() in BLOCKS.used


_suspensions: list[None] = []  # one per active `suspended` block


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Make `reused` return torch's own memory in the block, on all threads."""
    _suspensions.append(None)
    try:
        yield
    finally:
        _suspensions.pop()


def _watched() -> bool:
    mode = _get_current_dispatch_mode() is not None
    return mode or bool(_suspensions) or torch._C._autograd._profiler_enabled()


def reused(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `torch.empty_like`, over reused memory.

    It falls back to `torch.empty_like` for tensors not on the CPU, under 32 MiB or with gaps,
    outside Linux, and while allocations are observed; see [Note: watched].
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
