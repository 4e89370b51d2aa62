"""Fresh memory of large tensors on huge pages, which costs a fraction of what small pages cost.

The kernel hands out memory page by page, at the first write to each, and clears it: of 4 KiB pages
that takes four times as long as of 2 MiB ones. Where it is asked to (`MADV_HUGEPAGE`), and huge
pages are not switched off, it takes the large ones. Nothing else changes: no byte more is taken, as
only pages that lie in the tensor as a whole are asked for, and where there are none to be had the
kernel takes small ones.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

from dynoffload.units import MiB

_HUGE = 2 * MiB
_HUGEPAGE = 14  # of <sys/mman.h> on Linux
_OWN = 32 * MiB  # from here on glibc maps a block by itself, and unmaps it when it is freed


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages for memory that nobody has written to yet.

    Args:
        tensor: fresh, contiguous. On another device than the CPU, of less than 32 MiB, or on
            another system than Linux nothing is asked for.

    Returns:
        The tensor.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= _OWN and sys.platform == "linux":
        start = -(-tensor.data_ptr() // _HUGE) * _HUGE
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
        _libc().madvise(start, end - start, _HUGEPAGE)  # an advice: refused is as good as ignored
    return tensor
