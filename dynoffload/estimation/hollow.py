"""Weights that take no memory: each page of theirs is one of a few that all of them share.

What it is: `hollowed`, by which a model on the meta device computes for real while a block runs,
with values of the size that networks begin with. What it is not: initialisation; two weights may
have the same values, and what is computed with them is good for sizes, paths and times only.

[Note: shared pages]  A weight is an address range over which one file in memory is mapped again and
again. Reading takes no memory; what is written to takes memory of its own, as the mapping is
private. So the optimizer must not step, and modules initialise themselves before large weights are
there: what writes into a tensor on the meta device writes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterator

import torch
from torch import nn

from dynoffload.errors import BackendError, ConfigError
from dynoffload.runtime.access import InMemory
from dynoffload.runtime.filling import Give, Initialiser, fill
from dynoffload.runtime.materialize import Init, tensors_on_meta
from dynoffload.runtime.placing import put_in_place, to_meta
from dynoffload.units import KiB, MiB

_CONTENT = 16 * MiB  # of the file for one dtype
_MOST_RANGES = 16_384  # that are mapped; the kernel allows 65,530 by default
_SMALL = 64 * KiB  # weights below get memory, and the values of their initialisers
_SPREAD = 0.02  # standard deviation, as networks begin with
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


@contextlib.contextmanager
def hollowed(model: nn.Module, init: Init) -> Iterator[None]:
    """Have what of ``model`` is on the meta device compute while the block runs.

    Args:
        model: the network.
        init: how its weights would be given, as in `dynoffload.materialize`; small ones, and
            buffers, get theirs so. Of a file none is read: their modules' ``reset_parameters``
            are called, or what transformers itself calls.

    Raises:
        ConfigError: a module that owns small weights cannot initialise them.
        BackendError: the system lacks what this takes (Linux).
    """
    names = tensors_on_meta(model)
    if not names:
        yield
        return
    parameters = [one for one in model.parameters() if one.is_meta]
    large = [one for one in parameters if one.nbytes >= _SMALL]
    keep = {id(one) for one in large}
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    named = model.named_parameters(remove_duplicate=False)
    small = names - {name for name, one in named if id(one) in keep}
    try:
        for one in parameters:
            if id(one) not in keep:
                put_in_place(one, torch.zeros_like(one, device="cpu"))
        for module, name, buffer in buffers:
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            fill(model, _give_of(model, init), small, (), InMemory())
        share = sum(one.nbytes for one in large) // _MOST_RANGES
        for one in large:
            put_in_place(one, _hollow(one, max(_CONTENT, -(-share // _CONTENT) * _CONTENT)))
        yield
    finally:
        for one in parameters:
            if not one.is_meta:
                one.grad = None
                to_meta(one)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _give_of(model: nn.Module, init: Init) -> Give | Initialiser | None:
    """Return what initialises modules; a file's own weights are not read."""
    if isinstance(init, tuple):
        return init[1]
    if callable(init) or isinstance(init, Initialiser):
        return init
    if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        from dynoffload.integrations.constructing import PlainWeights

        return PlainWeights()
    return None


def _hollow(like: torch.Tensor, span: int) -> torch.Tensor:
    """Return a contiguous tensor like ``like`` whose pages are shared."""
    if like.layout is not torch.strided:
        raise ConfigError(f"a weight of layout {like.layout} cannot be estimated on meta")
    memory = _Range(like.nbytes, _file(like.dtype, span), span)
    flat = torch.frombuffer(memory.buffer(), dtype=torch.uint8, count=like.nbytes)
    return flat.view(like.dtype).view(like.shape)


@functools.cache
def _file(dtype: torch.dtype, nbytes: int) -> int:
    """Return the descriptor of a file in memory with random numbers."""
    generator = torch.Generator().manual_seed(0)
    element = torch.empty(0, dtype=dtype).element_size()
    count = nbytes // element
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(count, generator=generator, dtype=torch.float32).mul_(_SPREAD)
        content = drawn.to(dtype)
    else:
        content = torch.zeros(count, dtype=dtype)
    try:
        descriptor = os.memfd_create("dynoffload-weights")
        os.ftruncate(descriptor, nbytes)
    except (AttributeError, OSError) as error:
        raise BackendError(
            f"weights that take no memory need Linux's memfd_create ({error}): build the model in "
            "memory rather than on the meta device"
        ) from error
    with mmap.mmap(descriptor, nbytes) as file:
        target = torch.frombuffer(file, dtype=torch.uint8)
        target.copy_(content.view(torch.uint8))
        del target
    return descriptor


class _Range:
    """Addresses over which a file is mapped again and again, for as long as `buffer` is used."""

    def __init__(self, nbytes: int, file: int, span: int) -> None:
        page = mmap.PAGESIZE
        self.size = max(page, -(-nbytes // page) * page)
        libc = _libc()
        read_write = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = self._checked(libc.mmap(None, self.size, 0, flags, -1, 0))
        for at in range(0, self.size, span):
            part = min(span, self.size - at)
            flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
            self._checked(libc.mmap(self.address + at, part, read_write, flags, file, 0))

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """Return what tensors are made of; it keeps the addresses."""
        buffer = (ctypes.c_char * self.size).from_address(self.address)
        buffer._memory = self  # type: ignore[attr-defined]
        return buffer

    @staticmethod
    def _checked(address: int | None) -> int:
        if address is None or address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise BackendError(
                f"the addresses of weights cannot be mapped ({os.strerror(error)}): build the model"
                " in memory rather than on the meta device"
            )
        return address

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _libc().munmap(self.address, self.size)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_int64)
    libc.munmap.argtypes = (address, size)
    return libc
