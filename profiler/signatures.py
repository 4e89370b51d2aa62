"""Derives the memory traffic of an operator call from its schema.

`signature_of` reads an overload's schema once; `traffic` applies it to the arguments of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from dynoffload.profiler.flops import Counter, counter_of
from dynoffload.profiler.idioms import Idioms, idioms_of, rule_of

# Operators that read only the part of their first tensor that the others select.
_SELECTING = frozenset(
    "embedding index_select gather index take _unsafe_index _embedding_bag"
    " _embedding_bag_forward_only select_copy slice_copy".split()
)
# In-place operators that touch only the part of their first tensor that the others select.
_PLACING = frozenset(
    "index_add_ index_put_ _index_put_impl_ index_copy_ index_fill_ scatter_ scatter_add_"
    " scatter_reduce_ index_reduce_ put_".split()
)
# In-place operators whose result does not depend on the old values.
_OVERWRITING = frozenset("zero_ fill_ copy_ _foreach_zero_ _foreach_copy_".split())


@dataclass(frozen=True, slots=True)
class Signature:
    """Memory behaviour of one overload.

    Attributes:
        name: full name, such as ``"aten.mm.default"``.
        idioms: its six idiom counts.
        moves: False for views and metadata operators, which touch no data.
        allocates: False for views, whose result is never new memory.
        written: positions and names of the arguments it writes.
        fresh: whether it returns something that is not one of its arguments.
        overwrites: whether it writes its outputs without reading them first.
        selecting: whether it reads only as much of its first tensor as it returns.
        placing: whether it touches only as much of its first tensor as the others hold.
        flops: counts the floating-point operations of a call; None if it has no counter.
    """

    name: str
    idioms: Idioms
    moves: bool
    allocates: bool
    written: frozenset[int | str]
    fresh: bool
    overwrites: bool
    selecting: bool
    placing: bool
    flops: Counter | None


@dataclass(slots=True)
class Traffic:
    """The tensors one call read, wrote in place and returned, and the bytes read and written."""

    reads: list[torch.Tensor]
    writes: list[torch.Tensor]
    results: list[torch.Tensor]
    bytes_read: int
    bytes_written: int


@cache
def signature_of(func: torch._ops.OpOverload) -> Signature:
    """Return the signature of ``func``."""
    schema = func._schema
    base = schema.name.split("::", 1)[1]
    rule = rule_of(func)
    changed = [
        (place, argument)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    out = any(argument.is_out for _, argument in changed)
    return Signature(
        name=str(func),
        idioms=idioms_of(func),
        moves=rule not in ("view", "metadata"),
        allocates=rule != "view",
        written=frozenset(key for place, argument in changed for key in (place, argument.name)),
        fresh=any(r.alias_info is None for r in schema.returns),
        overwrites=out or base in _OVERWRITING or rule == "fill",
        selecting=base in _SELECTING,
        placing=base in _PLACING,
        flops=counter_of(func) if rule not in ("view", "metadata") else None,
    )


def traffic(
    signature: Signature, args: Sequence[object], kwargs: Mapping[str, object], result: object
) -> Traffic:
    """Return what one call read and wrote.

    A view counts the bytes of its elements, at most those of its storage: a tensor expanded from
    one row counts as that row. An argument written in place and also returned is listed once. The
    caller must detect results that share an argument's storage.

    Args:
        signature: signature of the overload that was called.
        args: positional arguments.
        kwargs: keyword arguments.
        result: the call's result.
    """
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    if not signature.moves:
        results = list(_tensors(result)) if signature.allocates else []
        return Traffic(reads, writes, results, 0, 0)
    for place, value in (*enumerate(args), *kwargs.items()):
        tensors = list(_tensors(value))
        if place in signature.written:
            writes += tensors
        if place not in signature.written or not signature.overwrites:
            reads += tensors
    results = list(_tensors(result)) if signature.fresh else []
    if results and writes:
        results = [made for made in results if all(made is not old for old in writes)]
    if signature.placing and writes:
        target = writes[0]
        others = [tensor for tensor in reads if tensor is not target]
        moved = max([tensor.numel() for tensor in others], default=target.numel())
        placed = min(moved * target.element_size(), shown_bytes(target))
        read = placed + sum([shown_bytes(tensor) for tensor in others])
        return Traffic(reads, writes, [], read, placed)
    written = sum([shown_bytes(tensor) for tensor in writes + results])
    if signature.selecting and reads:
        read = min(shown_bytes(reads[0]), written) + sum([shown_bytes(t) for t in reads[1:]])
    else:
        read = sum([shown_bytes(tensor) for tensor in reads])
    return Traffic(reads, writes, results, read, written)


def dtype_of(moved: Traffic) -> str:
    """Return the type that a call computes in, such as ``"bfloat16"``: that of the first
    floating-point tensor it read, wrote or made, else of the first tensor; ``""`` without any."""
    first = ""
    for tensors in (moved.reads, moved.writes, moved.results):
        for tensor in tensors:
            dtype = tensor.dtype
            if dtype.is_floating_point or dtype.is_complex:
                return _dtype_name(dtype)
            first = first or _dtype_name(dtype)
    return first


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shown_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor``'s elements, at most its storage's (sparse: of its parts)."""
    if tensor.layout is not torch.strided:
        return sum([part.nbytes for part in dense_parts(tensor)])
    nbytes: int = tensor.nbytes
    for stride in tensor.stride():
        if stride == 0:
            return min(nbytes, tensor.untyped_storage().nbytes())
    return nbytes


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that hold ``tensor``'s data: itself, or the parts of a sparse one.

    An unsupported layout has no parts; its bytes are not counted.
    """
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
