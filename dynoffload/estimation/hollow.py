"""Weights that take no memory: all of them map the same few pages.

`hollowed` lets a model on the meta device compute for real inside a block, with values of the usual
scale of initial weights. Weights may share values, so the results are valid for sizes, control flow
and times only.

[Note: shared pages]  A weight is an address range over which one in-memory file is mapped
repeatedly. Reading takes no memory. Written pages take memory of their own, since the mapping is
private. So the optimizer must not step.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from dynoffload.errors import BackendError, ConfigError
from dynoffload.memory.libc import libc
from dynoffload.units import KiB, MiB

_CONTENT = 16 * MiB  # unit of the size of each dtype's file
_MOST_RANGES = 16_384  # mapped ranges; the kernel allows 65,530 by default
_SMALL = 64 * KiB  # weights below this get memory of their own
_SPREAD = 0.02  # standard deviation, as is usual for initial weights
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


@contextlib.contextmanager
def hollowed(model: nn.Module) -> Iterator[None]:
    """Replace parameters and buffers on the meta device by ones that compute, during the block.

    The originals are restored afterwards, even if the replacements are still referenced. Weights
    are random numbers, scales and floating-point buffers ones, biases and integers zeros.

    Raises:
        ConfigError: a weight has a layout that cannot be mapped without memory.
        BackendError: the system does not support this (Linux only).
    """
    places = [
        (own, dict(own))
        for module in model.modules()
        for own in (module._parameters, module._buffers)
    ]
    whole = sum(one.nbytes for one in model.parameters() if one.is_meta)
    span = max(1, -(-whole // _MOST_RANGES // _CONTENT)) * _CONTENT
    files: dict[torch.dtype, int] = {}  # in memory, of ``span`` bytes each
    made: dict[torch.Tensor, torch.Tensor] = {}
    try:
        for own, before in places:
            for name, one in before.items():
                if one is not None and one.is_meta:
                    if one not in made:
                        made[one] = _stand_in(name, one, files, span)
                    own[name] = made[one]  # type: ignore[assignment]
        yield
    finally:
        for file in files.values():
            os.close(file)
        for own, before in places:
            own.clear()
            own.update(before)  # type: ignore[arg-type]


def _stand_in(
    name: str, one: torch.Tensor, files: dict[torch.dtype, int], span: int
) -> torch.Tensor:
    """Return the replacement of a parameter or buffer of this name."""
    is_weight = isinstance(one, nn.Parameter)
    if is_weight and one.nbytes >= _SMALL:
        value = _shared(one, files, span)
    else:
        value = torch.zeros_like(one, device="cpu", requires_grad=False)
        if is_weight and value.ndim > 1 and value.is_floating_point():
            generator = torch.Generator().manual_seed(0)
            value.copy_(
                torch.randn(value.shape, generator=generator, dtype=torch.float32) * _SPREAD
            )
        elif not is_weight or "bias" not in name:
            value.fill_(value.is_floating_point() or value.dtype is torch.bool)
    if not is_weight:
        return value
    made = nn.Parameter(value, requires_grad=one.requires_grad)
    made.__dict__.update(one.__dict__)
    return made


def _shared(like: torch.Tensor, files: dict[torch.dtype, int], span: int) -> torch.Tensor:
    """Return a tensor like ``like`` whose pages are those of the file of its dtype."""
    if like.layout is not torch.strided:
        raise ConfigError(
            f"a weight of layout {like.layout} on the meta device cannot be estimated: build the "
            "model in memory"
        )
    if like.dtype not in files:
        files[like.dtype] = _file(like.dtype, span)
    memory = _mapped(like.nbytes, files[like.dtype], span)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=like.nbytes)
    strides = torch.empty_like(like).stride()  # those of ``like``, without gaps
    return flat.view(like.dtype).as_strided(like.shape, strides)


def _file(dtype: torch.dtype, nbytes: int) -> int:
    """Return the descriptor of a new in-memory file of random numbers."""
    generator = torch.Generator().manual_seed(0)
    content = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(len(content), generator=generator, dtype=torch.float32)
        content.copy_(drawn.mul_(_SPREAD))
    try:
        descriptor = os.memfd_create("dynoffload-weights")
    except (AttributeError, OSError) as error:
        raise BackendError(
            f"weights that take no memory need Linux's memfd_create ({error}): build the model in "
            "memory rather than on the meta device"
        ) from error
    os.ftruncate(descriptor, nbytes)
    with mmap.mmap(descriptor, nbytes) as file:
        target = torch.frombuffer(file, dtype=torch.uint8)
        target.copy_(content.view(torch.uint8))
        del target
    return descriptor


def _mapped(nbytes: int, file: int, span: int) -> ctypes.Array[ctypes.c_char]:
    """Return an address range that maps a file repeatedly; unmapped when no longer referenced."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _checked(libc().mmap(None, size, 0, flags, -1, 0))
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, libc().munmap, address, size).atexit = False
    read_write = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    for at in range(0, size, span):
        _checked(libc().mmap(address + at, min(span, size - at), read_write, flags, file, 0))
    return buffer


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        why = os.strerror(ctypes.get_errno())
        raise BackendError(
            f"the addresses of weights cannot be mapped ({why}): build the model in memory rather "
            "than on the meta device"
        )
    return address
