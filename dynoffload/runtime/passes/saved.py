"""What the saved-tensor hooks hand to autograd in the place of a tensor.

Backward gets the same tensor of it, or the same error.

[Note: lazy bits]  A conjugate, and the imaginary part of one, lies in memory as what it was made
from and carries a bit that says how to read it. The bytes are copied as they lie and the bits put
back: a kernel may go another way for a tensor without them.

[Note: subclasses]  Autograd gives a tensor of a subclass back as the object that it was, attributes
and all, and so do we. One that requires grad it gives back as a plain tensor wherever hooks are at
work, whatever they do.
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

from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.store import offset_of
from dynoffload.runtime.counting import parts_of
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.unseen import unseen

ALIGNMENT = 64  # of what torch allocates, and of what lies in a chunk

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
    """A region being filled with saved storages, or waiting for backward."""

    index: int
    region: int
    size: int
    filled: int = 0
    live: int = 0
    open: bool = True


class Entry:
    """One saved storage's copy inside a chunk; ends with its last saved tensor."""

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
        source: torch.UntypedStorage,
        tensor: torch.Tensor,
    ) -> None:
        self.chunk, self.offset = chunk, offset
        self.source, self.version = weakref.ref(source), tensor._version
        self.spread: weakref.ref[torch.UntypedStorage] | None = None  # made by `Columns`
        self.witness = witness_of(tensor)

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Return whether the copy is also that of ``tensor``, which lies in the same storage."""
        version = tensor._version
        if self.source() is None or self.version != version or self.witness._version != version:
            return False
        with _unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return bool(self.witness._version != version)  # else they count writes apart


class Packed:
    """A saved tensor whose bytes lie in a chunk, ``offset`` elements into its entry."""

    __slots__ = ("conj", "dtype", "entry", "neg", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor, entry: Entry, offset: int) -> None:
        self.entry, self.offset = entry, offset
        self.dtype, self.size = tensor.dtype, tensor.size()
        self.stride: tuple[int, ...] = tensor.stride()
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()

    def check(self) -> None:
        """Raise what autograd raises if the original was modified since."""
        _check(self.entry.version, self.entry.witness._version, self.size, self.dtype)

    def unpack(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor as it was saved; ``storage`` is the chunk's."""
        lying = self._spread(self.lying_in(storage))
        if self.conj:
            lying = torch._conj(lying)
        return torch._neg_view(lying) if self.neg else lying

    def lying_in(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return what lies in the chunk, without bits; see [Note: lazy bits]."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        offset = self.entry.offset // empty.element_size() + self.offset
        return empty.set_(storage, offset, self.size, self.stride)

    def _spread(self, lying: torch.Tensor) -> torch.Tensor:
        """Return what lies in the chunk as it lay when it was saved."""
        return lying


class Columns(Packed):
    """A saved tensor with gaps, such as some columns of a table, which lies in a chunk without.

    Backward gets the strides that it had, as kernels go by them: over its own storage while anybody
    holds that, else over memory that is as large with the gaps and lives as long as the use.
    """

    __slots__ = ("nbytes", "place", "skew", "strides")

    def __init__(self, tensor: torch.Tensor, entry: Entry, offset: int) -> None:
        super().__init__(tensor, entry, offset)
        self.strides, self.stride = self.stride, ()  # in order
        self.place, self.nbytes = offset_of(tensor), tensor.untyped_storage().nbytes()
        self.skew = tensor.data_ptr() % ALIGNMENT // tensor.element_size()

    def _spread(self, lying: torch.Tensor) -> torch.Tensor:
        source = self.entry.source()
        if source is not None and source.nbytes() == self.nbytes:
            return self._over(source, self.place)
        known = None if self.entry.spread is None else self.entry.spread()
        if known is not None:  # for another use of the same
            return self._over(known, self.skew)
        steps = list(zip(self.size, self.strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in steps)
        made = torch.empty(self.skew + span, dtype=self.dtype, device=lying.device)
        spread = made.untyped_storage()
        del made  # the storage lives as long as what is used of it
        self.entry.spread = weakref.ref(spread)
        gapped = self._over(spread, self.skew)
        once = tuple(slice(None if stride else 1) for _, stride in steps)  # of what is expanded
        gapped[once].copy_(lying[once])
        return gapped

    def _over(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, offset, self.size, self.strides)


class InPlace:
    """A saved tensor that stays where it is; ``region``: of the parameter that it views, or -1."""

    __slots__ = ("__weakref__", "region", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, region: int = -1) -> None:
        self.tensor = tensor if is_of_a_subclass(tensor) else tensor.detach()
        self.region, self.version = region, tensor._version

    def check(self) -> None:
        """Raise what autograd raises if the tensor was modified since."""
        now = self.tensor._version
        if self.version != now:  # a nested tensor has no size to name
            size = torch.Size() if self.tensor.is_nested else self.tensor.size()
            _check(self.version, now, size, self.tensor.dtype)

    def let_go(self) -> None:
        """Hold the region's memory no more: nobody will ask for it."""
        self.tensor = _EMPTY


def _check(version: int, now: int, shape: torch.Size, dtype: torch.dtype) -> None:
    if version != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{dtype}, shape {list(shape)}] is at version {now}; expected version "
            f"{version} instead"
        )


def is_plain(tensor: torch.Tensor, kind: str = "cpu") -> bool:
    """Return whether a tensor is bytes in one storage on a kind of device, and no more."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.device.type == kind
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not is_traceable_wrapper_subclass(tensor)
    )


def is_of_a_subclass(tensor: torch.Tensor) -> bool:
    """Return whether backward must get this very object; see [Note: subclasses]."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not tensor.requires_grad


def witness_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of ``tensor`` and its views, and holds none
    of their bytes."""
    witness = as_it_lies(tensor).detach()
    kin = torch._has_compatible_shallow_copy_type(witness, _EMPTY)  # of the CPU, CUDA and some more
    witness.data = _EMPTY if kin else witness.new_empty(0)
    return witness


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` without its bits; see [Note: lazy bits]."""
    if tensor.is_conj():
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def cast_that_autocast_keeps(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the copy of a weight, as autocast makes and keeps it, that ``tensor`` is or views.

    None too if anybody else has hold of it, in Python or by its storage, who would not follow to
    another: a cast that the user made stays what it is.
    """
    if _references(tensor) != _references_of_autocast().get(tensor._base is not None):
        return None
    if _weight_of(tensor) is None:
        return None
    base = tensor._base
    holders = 1 + (base is not None)  # and the storage's own object
    if users_of(tensor.untyped_storage()) > holders + 1:
        return None
    return tensor if base is None else base


def _weight_of(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """Return the parameter of which ``tensor`` is a cast, or a view of one."""
    base = tensor._base
    node = (tensor if base is None else base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    (source, _), *_ = node.next_functions
    weight = getattr(source, "variable", None)
    return weight if isinstance(weight, torch.nn.Parameter) else None


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many references Python has to a tensor, and to what it views."""
    viewed = 0 if tensor._base is None else sys.getrefcount(tensor._base)
    return sys.getrefcount(tensor), viewed


@functools.cache
def _references_of_autocast() -> dict[bool, tuple[int, int]]:
    """Return what `_references` says, as deep in calls as above, of a cast that autocast alone
    holds, by whether it is a view that is saved: asked of autocast itself."""
    found: dict[bool, tuple[int, int]] = {}

    def ask(tensor: torch.Tensor) -> None:
        references = _references(tensor)
        if _weight_of(tensor) is not None:
            found[tensor._base is not None] = references

    class Hooks:
        @uninterrupted  # as the hook is that asks: both refer to the tensor too
        @unseen
        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
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


def memory_of(tensor: torch.Tensor, kind: str = "cpu") -> tuple[list[torch.UntypedStorage], int]:
    """Return the storages on a kind of device behind a tensor of any sort, sparse or wrapped, and
    the bytes of it that lie in none."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    parts: Iterable[torch.Tensor]
    if flatten is not None:
        names, _ = flatten()
        parts = [getattr(tensor, name) for name in names]
    elif tensor.device.type != kind or tensor._is_zerotensor():
        return [], 0
    elif tensor.layout == torch.strided:
        return [tensor.untyped_storage()], 0
    elif tensor.layout in _SPARSE:
        parts = parts_of(tensor)
    else:
        return [], tensor.numel() * tensor.element_size()
    each = [memory_of(part, kind) for part in parts]
    return [one for storages, _ in each for one in storages], sum(others for _, others in each)


def name_of_kind(tensor: torch.Tensor) -> str:
    """Return what messages call a tensor that stays in place."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    return "a sparse tensor" if tensor.layout in _SPARSE else "a tensor"
