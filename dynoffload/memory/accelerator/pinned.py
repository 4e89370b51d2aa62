"""Host memory that an accelerator copies from and to, pinned where possible.

[Note: pinned memory]  Copies overlap computation only from and to pinned memory. torch's own pinned
memory comes in powers of two, up to twice the request. So on CUDA (and HIP, which torch gives the
same name) a private mapping of the exact size is registered with the driver. Where that is refused,
or there is no such call, torch's pinned memory is used. Without that, memory is not pinned: copies
are still exact, but nothing overlaps them.

[Note: first touch]  The driver touches pages that are new one after another, on one thread. So they
are touched before, by a thread for each core. They lie on memory nodes of these cores: those to
which the process is bound, if it is. MADV_POPULATE_WRITE (Linux 5.14) touches pages without a fault
for each, and does not write them twice.

[Note: forks]  A forked process would get a copy of all pinned pages at once, or would leave the
accelerator with pages that are no longer this process's. So pages in use are not inherited
(MADV_DONTFORK), and an access ends a forked process; for paged tensors,
`dynoffload.runtime.forked` raises an error first. A forked process does not unmap the pages either,
as it may use their addresses for other memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dynoffload.memory.libc import libc, map_memory
from dynoffload.units import MiB, format_bytes

logger = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_PORTABLE = 1  # of cudaHostRegister: pinned for every device
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap lacks
_TOUCHED = 64 * MiB  # bytes that a thread touches at once


class HostMemory:
    """Allocates host memory for the copies of one accelerator.

    Args:
        device: the accelerator, with its index.

    Attributes:
        pinned: whether all allocated memory is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: set[int] = set()  # addresses
        self.pinned = True

    def take(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of page-aligned memory, uint8; see [Note: pinned memory].

        Raises:
            MemoryError: there is none left.
        """
        return self._pages(-(-nbytes // _PAGE) * _PAGE)[:nbytes]

    def give_back(self, memory: torch.Tensor) -> None:
        """Unpin memory from `take`, all of it; tensors that still use it keep it allocated."""
        address = memory.data_ptr()
        if address in self._registered:
            self._registered.remove(address)
            code = int(_runtime().cudaHostUnregister(address))
            if code:
                logger.warning("host memory of %s stays pinned (error %d)", self._device, code)
                self._forget_error()
        _let_inherit(memory, inherited=True)

    def _pages(self, nbytes: int) -> torch.Tensor:
        memory = _mapped(nbytes)
        why = self._register(memory)
        if not why:
            self._registered.add(memory.data_ptr())
            return memory
        del memory  # before torch allocates as much
        try:
            memory = _pinned_by_torch(nbytes)
        except RuntimeError as error:
            if self.pinned:
                self.pinned = False
                logger.warning(
                    "host memory cannot be pinned for %s (%s; %s): copies hold computation up; "
                    "raise the limit of locked memory (ulimit -l), or lower host_budget",
                    self._device,
                    why,
                    str(error).partition("\n")[0],
                )
            return _mapped(nbytes)
        if self.pinned:
            logger.info(
                "%s for %s is pinned by torch, in powers of two: %s",
                format_bytes(nbytes),
                self._device,
                why,
            )
        return memory

    def _register(self, memory: torch.Tensor) -> str:
        """Pin memory; return why it was not pinned, "" if it was."""
        if self._device.type != "cuda":
            return f"torch has no call for it on {self._device.type}"
        address, nbytes = memory.data_ptr(), memory.nbytes
        _touch(address, nbytes)
        with torch.accelerator.device_index(self._device.index):
            code = int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
            if not code:
                return ""
            self._forget_error()
        return f"cudaHostRegister returned {code}"

    def _forget_error(self) -> None:
        """Clear the runtime's sticky error, which the next kernel launch would report, by launching
        a kernel."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _mapped(nbytes: int) -> torch.Tensor:
    """Return private memory of whole pages, which no forked process inherits.

    Raises:
        MemoryError: there is none left.
    """
    try:
        address = map_memory(nbytes)
    except OSError as error:
        raise MemoryError(error.strerror) from error
    buffer = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(buffer, _unmap, os.getpid(), address, nbytes).atexit = False
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    _let_inherit(memory, inherited=False)
    return memory


def _touch(address: int, nbytes: int) -> None:
    """Give new memory of whole pages its pages; see [Note: first touch]."""

    def touch(begin: int) -> None:
        part = min(_TOUCHED, address + nbytes - begin)
        if libc().madvise(begin, part, _POPULATE_WRITE):  # the kernel knows no such advice
            ctypes.memset(begin, 0, part)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "dynoffload-touch") as threads:
        list(threads.map(touch, range(address, address + nbytes, _TOUCHED)))


def _unmap(process: int, address: int, nbytes: int) -> None:
    if os.getpid() == process:  # see [Note: forks]
        libc().munmap(address, nbytes)


def _pinned_by_torch(nbytes: int) -> torch.Tensor:
    """Return torch's pinned memory of whole pages; one byte more could double the allocation.

    Raises:
        RuntimeError: torch has none.
    """
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if memory.data_ptr() % _PAGE:  # the driver's own allocator aligns it
        del memory
        memory = torch.empty(nbytes + _PAGE, dtype=torch.uint8, pin_memory=True)
    begin = -memory.data_ptr() % _PAGE
    memory = memory[begin : begin + nbytes]
    _let_inherit(memory, inherited=False)
    return memory


def _let_inherit(memory: torch.Tensor, *, inherited: bool) -> None:
    """Set whether forked processes inherit the pages of ``memory``; see [Note: forks].

    Only Linux can. A driver's own mapping rejects being inherited, which does no harm.
    """
    advice = getattr(mmap, "MADV_DOFORK" if inherited else "MADV_DONTFORK", None)
    if advice is not None:
        libc().madvise(memory.data_ptr(), -(-memory.nbytes // _PAGE) * _PAGE, advice)
