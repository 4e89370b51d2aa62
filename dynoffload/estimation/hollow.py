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
import mmap
import os
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from dynoffload.errors import BackendError, ConfigError
from dynoffload.memory.libc import libc
from dynoffload.runtime.initialising import Give, Initialiser, fill, own_tensors, tensors_on_meta
from dynoffload.runtime.meta_init import Init
from dynoffload.runtime.placing import zero_buffers
from dynoffload.units import KiB, MiB

_CONTENT = 16 * MiB  # of the file for one dtype
_MOST_RANGES = 16_384  # that are mapped; the kernel allows 65,530 by default
_SMALL = 64 * KiB  # weights below get memory, and the values of their initialisers
_SPREAD = 0.02  # standard deviation, as networks begin with
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


@contextlib.contextmanager
def hollowed(model: nn.Module, init: Init) -> Iterator[None]:
    """Have what of ``model`` is on the meta device compute while the block runs.

    Others stand in the places of its parameters and buffers meanwhile; afterwards those that were
    there are there again, whatever still holds the others.

    Args:
        model: the network.
        init: how its weights would be given, as in `dynoffload.materialize`; small ones, and
            buffers, get theirs so. Of a file none is read: their modules' ``reset_parameters``
            are called, or what transformers itself calls, or they get ones and zeros.

    Raises:
        ConfigError: a module that owns small weights cannot initialise them.
        BackendError: the system lacks what this takes (Linux).
    """
    names = tensors_on_meta(model)
    if not names:
        yield
        return
    parameters = [(module._parameters, dict(module._parameters)) for module in model.modules()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    stand_ins = _StandIns()
    try:
        large = {
            name
            for name, one in model.named_parameters(remove_duplicate=False)
            if one.is_meta and one.nbytes >= _SMALL
        }
        stand_ins.put(model, lambda one: one.nbytes < _SMALL, _zeros)
        zero_buffers(model)
        _fill(model, init, names - large)
        whole = sum(one.nbytes for one in model.parameters() if one.is_meta)
        files = _Files(max(1, -(-whole // _MOST_RANGES // _CONTENT)) * _CONTENT)
        with contextlib.closing(files):
            stand_ins.put(model, lambda one: True, files.hollow)
        yield
    finally:
        for own, before in parameters:
            own.clear()
            own.update(before)
        for there, earlier in buffers:
            there.clear()
            there.update(earlier)


class _StandIns:
    """Parameters in the places of others, one for each, under whatever names."""

    def __init__(self) -> None:
        self._of: dict[nn.Parameter, nn.Parameter] = {}

    def put(
        self,
        model: nn.Module,
        wanted: Callable[[nn.Parameter], bool],
        make: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Let stand-ins take the places of those that are on the meta device and ``wanted``."""
        for module in model.modules():
            for name, one in module._parameters.items():
                if one is not None and one.is_meta and wanted(one):
                    if one not in self._of:
                        made = nn.Parameter(make(one), requires_grad=one.requires_grad)
                        made.__dict__.update(one.__dict__)
                        self._of[one] = made
                    module._parameters[name] = self._of[one]


def _zeros(one: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(one, device="cpu", requires_grad=False)


def _fill(model: nn.Module, init: Init, names: Collection[str]) -> None:
    """Initialise ``names``, while all else is on the meta device, where writing does nothing."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            fill(model, _give_of(model, init), names, ())
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the small weights of this {type(model).__name__} cannot be initialised while its "
            f"large ones are on the meta device ({type(error).__name__}: {error}): build the model "
            "in memory"
        ) from error


def _give_of(model: nn.Module, init: Init) -> Give | Initialiser | None:
    """Return what initialises modules; a file's own weights are not read."""
    if isinstance(init, tuple):
        return init[1]
    if callable(init) or isinstance(init, Initialiser):
        return init
    if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        from dynoffload.integrations.constructing import PlainWeights

        return PlainWeights()
    return None if init is None else _plainly


def _plainly(module: nn.Module) -> None:
    """Initialise a module whose weights come from a file."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
        return
    for name, tensor in own_tensors(module).items():
        tensor.fill_(0 if "bias" in name else 1)


class _Files:
    """Files in memory that hollow tensors are made of; these stay when the files are closed.

    Args:
        span: bytes of each.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._files: dict[torch.dtype, int] = {}

    def close(self) -> None:
        """Close all."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def hollow(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor like ``like`` whose pages are shared."""
        if like.layout is not torch.strided:
            raise ConfigError(
                f"a weight of layout {like.layout} on the meta device cannot be estimated: build "
                "the model in memory"
            )
        if like.dtype not in self._files:
            self._files[like.dtype] = _file(like.dtype, self._span)
        memory = _Range(like.nbytes, self._files[like.dtype], self._span)
        flat = torch.frombuffer(memory.buffer(), dtype=torch.uint8, count=like.nbytes)
        strides = torch.empty_like(like).stride()  # those of ``like``, without gaps
        return flat.view(like.dtype).as_strided(like.shape, strides)


def _file(dtype: torch.dtype, nbytes: int) -> int:
    """Return the descriptor of a new file in memory with random numbers."""
    generator = torch.Generator().manual_seed(0)
    count = nbytes // torch.empty(0, dtype=dtype).element_size()
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(count, generator=generator, dtype=torch.float32).mul_(_SPREAD)
        content = drawn.to(dtype)
    else:
        content = torch.zeros(count, dtype=dtype)
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


class _Range:
    """Addresses over which a file is mapped again and again, for as long as `buffer` is used."""

    def __init__(self, nbytes: int, file: int, span: int) -> None:
        page = mmap.PAGESIZE
        self.size = max(page, -(-nbytes // page) * page)
        read_write = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = self._checked(libc().mmap(None, self.size, 0, flags, -1, 0))
        for at in range(0, self.size, span):
            part = min(span, self.size - at)
            flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
            self._checked(libc().mmap(self.address + at, part, read_write, flags, file, 0))

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
            libc().munmap(self.address, self.size)
