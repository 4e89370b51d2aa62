"""What the pack hook returns to autograd in place of saved tensors.

Unpacking returns an equal tensor, or raises where plain PyTorch would.

[Note: lazy bits]  A conjugate, or the imaginary part of one, shares its source's memory; its conj
or neg bit tells kernels how to read it. Raw bytes are copied. Unpacking sets the bits again, as
kernels may take another path without them.

[Note: subclasses]  Autograd returns a saved tensor of a subclass as the same object, with its
attributes, and so do we. If any saved-tensor hooks are set, it returns those that require grad as
plain tensors.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynoffload.memory.accelerator.guarded import fit, kind_of, plain_alias, present, untraced
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.store import offset_of
from dynoffload.runtime.counting import parts_of
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.unseen import unseen

ALIGNMENT = 64  # of torch's allocations and of storages in a chunk, in bytes

_EMPTY = torch.empty(0)
_SPARSE = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_bsr,
    torch.sparse_csc,
    torch.sparse_bsc,
)


@dataclass(eq=False)
class Chunk:
    """A region of saved storages: open while forward fills it, then kept until backward.

    Its ``index`` is -1 if it was made for one large tensor.
    """

    index: int
    region: int
    size: int
    filled: int = 0
    live: int = 0
    open: bool = True


class Source:
    """A storage of which saved tensors were copied; freed with the last of these entries."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = weakref.ref(storage)


class Entry:
    """A copy of a saved storage, or of part of one, in a chunk; freed with its last tensor."""

    __slots__ = (
        "__weakref__",
        "chunk",
        "offset",
        "source",
        "spread",
        "version",
        "witness",
    )

    def __init__(
        self,
        chunk: Chunk,
        offset: int,
        source: Source,
        tensor: torch.Tensor,
    ) -> None:
        self.chunk, self.offset = chunk, offset
        self.source, self.version = source, tensor._version
        self.spread: weakref.ref[torch.UntypedStorage] | None = None  # made by `Columns`
        self.witness = witness_of(tensor)

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor``, whose bytes were copied, still has the values copied."""
        version = tensor._version
        if (
            self.source.storage() is None
            or self.version != version
            or self.witness._version != version
        ):
            return False
        with _unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return bool(self.witness._version != version)  # else they do not share one counter


class Packed:
    """A saved tensor whose bytes are stored in a chunk, ``offset`` elements into its entry.

    It is ``compiled`` if a compiled module saved it.
    """

    __slots__ = ("compiled", "conj", "dtype", "entry", "neg", "offset", "size", "stride")

    def __init__(
        self, tensor: torch.Tensor, entry: Entry, offset: int, compiled: bool = False
    ) -> None:
        self.entry, self.offset, self.compiled = entry, offset, compiled
        self.dtype, self.size = tensor.dtype, tensor.size()
        self.stride: tuple[int, ...] = tensor.stride()
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()

    def check(self) -> None:
        """Raise an error like autograd's if the original was modified since."""
        _check(self.entry.version, self.entry.witness._version, self.size, self.dtype)

    def unpack(self, storage: torch.UntypedStorage, *, plain: bool = False) -> torch.Tensor:
        """Return the saved tensor; ``storage`` is that of its chunk's region. It is ``plain`` if it
        has no guard, and its region stays."""
        raw = self._with_strides(self.raw_in(storage))
        raw = raw if plain else fit(raw)
        if self.conj:
            raw = torch._conj(raw)
        return torch._neg_view(raw) if self.neg else raw

    def raw_in(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in the chunk, without lazy bits; see [Note: lazy bits]."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        offset = self.entry.offset // empty.element_size() + self.offset
        return empty.set_(present(storage), offset, self.size, self.stride)

    def _with_strides(self, raw: torch.Tensor) -> torch.Tensor:
        """Return ``raw`` with the strides that the tensor had when it was saved."""
        return raw


class Columns(Packed):
    """A saved tensor with gaps, such as some columns of a matrix; in its chunk it is contiguous.

    Unpacking returns it with its strides, because kernels depend on them. It uses the original
    storage if that is alive and of the same size, else a temporary copy with gaps, ``skew``
    elements past a 64-byte boundary like the original.
    """

    __slots__ = ("nbytes", "place", "skew", "strides")

    def __init__(
        self, tensor: torch.Tensor, entry: Entry, offset: int, compiled: bool = False
    ) -> None:
        super().__init__(tensor, entry, offset, compiled)
        self.strides, self.stride = self.stride, ()  # contiguous in the chunk
        self.place, self.nbytes = offset_of(tensor), tensor.untyped_storage().nbytes()
        self.skew = tensor.data_ptr() % ALIGNMENT // tensor.element_size()

    def _with_strides(self, raw: torch.Tensor) -> torch.Tensor:
        source = self.entry.source.storage()
        if source is not None and source.nbytes() == self.nbytes:
            return self._over(source, self.place)
        known = None if self.entry.spread is None else self.entry.spread()
        if known is not None:  # made by an earlier unpacking
            return self._over(known, self.skew)
        steps = list(zip(self.size, self.strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in steps)
        made = torch.empty(self.skew + span, dtype=self.dtype, device=raw.device)
        spread = made.untyped_storage()
        self.entry.spread = weakref.ref(spread)
        gapped = self._over(spread, self.skew)
        once = tuple(slice(None if stride else 1) for _, stride in steps)  # stride 0: one element
        gapped[once].copy_(raw[once])
        return gapped

    def _over(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, offset, self.size, self.strides)


class InPlace:
    """A saved tensor kept in place; ``region`` is that of the parameter it comes from, or -1. It is
    ``compiled`` if a compiled module saved it."""

    __slots__ = ("__weakref__", "compiled", "region", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, region: int = -1, *, compiled: bool = False) -> None:
        self.compiled = compiled
        # Unpacking guards it again.
        alias = plain_alias(tensor)
        self.tensor = tensor if is_of_a_subclass(tensor) else alias.detach()
        self.region, self.version = region, tensor._version

    def check(self) -> None:
        """Raise an error like autograd's if the tensor was modified since."""
        now = self.tensor._version
        if self.version != now:
            # A nested tensor has no size for the message.
            size = torch.Size() if self.tensor.is_nested else self.tensor.size()
            _check(self.version, now, size, self.tensor.dtype)

    def release(self) -> None:
        """Release the tensor's memory; it will not be unpacked again."""
        self.tensor = _EMPTY


def _check(version: int, now: int, shape: torch.Size, dtype: torch.dtype) -> None:
    if version != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{dtype}, shape {list(shape)}] is at version {now}; expected version "
            f"{version} instead"
        )


def is_plain(tensor: torch.Tensor, device_type: str) -> bool:
    """Return whether a tensor is strided, in one storage, unwrapped, and on such a device."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.device.type == device_type
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not is_traceable_wrapper_subclass(tensor)
    )


def is_of_a_subclass(tensor: torch.Tensor) -> bool:
    """Return whether unpacking must return this same object; see [Note: subclasses]."""
    return kind_of(tensor) not in (torch.Tensor, torch.nn.Parameter) and not tensor.requires_grad


def witness_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares only the version counter of ``tensor``."""
    witness = without_lazy_bits(tensor).detach()
    # True on the CPU, on CUDA and on some other devices.
    compatible = torch._has_compatible_shallow_copy_type(witness, _EMPTY)
    witness.data = _EMPTY if compatible else witness.new_empty(0)
    return witness


def without_lazy_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` without its lazy bits; see [Note: lazy bits]."""
    if tensor.is_conj():
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def cast_that_autocast_keeps(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return autocast's cached copy of a weight, if ``tensor`` is or views one, or None.

    None is also returned if anything else refers to the copy or its storage, as user code's own
    casts do: such references would keep the old memory.
    """
    if _references(tensor) != _references_of_autocast().get(tensor._base is not None):
        return None
    if _weight_of(tensor) is None:
        return None
    base = tensor._base
    holders = 1 + (base is not None)
    if users_of(tensor.untyped_storage()) > holders + 1:  # and the storage's own object
        return None
    return tensor if base is None else base


def _weight_of(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """Return the parameter whose cast ``tensor`` is, or views; else None."""
    base = tensor._base
    node = (tensor if base is None else base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    (source, _), *_ = node.next_functions
    weight = getattr(source, "variable", None)
    return weight if isinstance(weight, torch.nn.Parameter) else None


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the Python reference counts of a tensor and of its base (0 without one)."""
    viewed = 0 if tensor._base is None else sys.getrefcount(tensor._base)
    return sys.getrefcount(tensor), viewed


@functools.cache
def _references_of_autocast() -> dict[bool, tuple[int, int]]:
    """Return `_references` of a cast that only autocast holds, by whether a view of it is saved.
    They are measured at the call depth of `cast_that_autocast_keeps`: each frame adds one."""
    found: dict[bool, tuple[int, int]] = {}

    def ask(tensor: torch.Tensor) -> None:
        references = _references(tensor)
        if _weight_of(tensor) is not None:
            found[tensor._base is not None] = references

    class Hooks:  # decorated as the real ones are: each decorator adds a reference
        @untraced
        @unseen
        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            return self._pack(tensor)

        @uninterrupted
        def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
            ask(tensor)
            return tensor

        def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    hooks, x = Hooks(), torch.zeros(1, 2, 2, requires_grad=True)
    matrix, stack = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(1, 2, 2))
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack),
    ):
        torch.bmm(x, stack)
        torch.nn.functional.linear(x[0], matrix)
    return found


def memory_of(tensor: torch.Tensor, device_type: str) -> tuple[list[torch.UntypedStorage], int]:
    """Return the storages on such a device behind any tensor, including sparse and wrapped ones,
    and its bytes that are in no storage."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    parts: Iterable[torch.Tensor]
    if flatten is not None:
        names, _ = flatten()
        parts = [getattr(tensor, name) for name in names]
    elif tensor.device.type != device_type or tensor._is_zerotensor():
        return [], 0
    elif tensor.layout == torch.strided:
        return [tensor.untyped_storage()], 0
    elif tensor.layout in _SPARSE:
        parts = parts_of(tensor)
    else:
        return [], tensor.numel() * tensor.element_size()
    each = [memory_of(part, device_type) for part in parts]
    return [one for storages, _ in each for one in storages], sum(others for _, others in each)


def name_of_kind(tensor: torch.Tensor) -> str:
    """Return what a tensor that stays in place is called in messages."""
    if kind_of(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    return "a sparse tensor" if tensor.layout in _SPARSE else "a tensor"
