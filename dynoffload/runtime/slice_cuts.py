"""Cuts operators on tensors over rows into operators on single slices.

[Note: by slices]  Elementwise operators give the same bits by slices, except at the ends of a CPU
thread's share: see the note on tails in `dynoffload.runtime.adoption.slicing`. Tensors of the same
shape are cut alike, and smaller ones go to each slice whole. A clear slice that is multiplied or
clamped stays clear if the factor allows it. Reading the factor makes the host wait for the
accelerator once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynoffload.memory.accelerator.rows import Row
from dynoffload.runtime.adoption.slicing import ends_evenly
from dynoffload.runtime.operators import effects_of, unwrapped

_aten = torch.ops.aten

ZEROING = {_aten.zero_.default, _aten._foreach_zero_.default}
_COPYING = {_aten.copy_.default, _aten.clone.default, _aten._to_copy.default}
_COPYING |= {_aten._foreach_copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor}


def _is_positive(number: float) -> bool:
    return math.isfinite(number) and math.copysign(1.0, number) > 0


KEEPING_ZEROS: dict[Any, tuple[int, Callable[[float], bool]]] = {
    # which argument decides, and whether it leaves +0 unchanged
    _aten.mul_.Tensor: (1, _is_positive),
    _aten.mul_.Scalar: (1, _is_positive),
    _aten._foreach_mul_.Tensor: (1, _is_positive),
    _aten._foreach_mul_.Scalar: (1, _is_positive),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: (2, _is_positive),
    _aten._foreach_clamp_min_.Scalar: (1, lambda least: least < 0),
    _aten._foreach_clamp_max_.Scalar: (1, lambda most: most > 0),
}


@functools.cache
def is_over_lists(func: Any) -> bool:
    """Return whether an operator treats each position of its lists separately."""
    name = func._schema.name.rpartition("::")[2]
    return bool(name.startswith(("_foreach_", "_amp_foreach_")))


@functools.cache
def is_by_element(func: Any) -> bool:
    """Return whether an operator is elementwise, and has one result at most."""
    if is_over_lists(func):
        return bool(func._schema.name.endswith("_"))
    by_element = torch.Tag.pointwise in func.tags or func in ZEROING or func in _COPYING
    returns = [str(one.type) for one in func._schema.returns]
    return by_element and not effects_of(func).draws and returns == ["Tensor"]


@dataclass(frozen=True, eq=False, slots=True)
class Over:
    """A tensor over a row.

    Attributes:
        given: the argument itself.
        plain: the tensor below the wrappers of `torch.func`.
        row: the row that it is over.
        slices: from its first byte's slice to its last byte's.
    """

    given: torch.Tensor
    plain: torch.Tensor
    row: Row
    slices: range


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensors of ``shape`` are cut into slices: ``pieces`` pieces of ``length`` along the first
    dimension."""

    shape: torch.Size
    pieces: int
    length: int

    def piece(self, value: Any, number: int) -> Any:
        """Return one piece of an argument, or the argument itself if it is the same for all."""
        if isinstance(value, torch.Tensor) and value.shape == self.shape:
            return unwrapped(value).narrow(0, number * self.length, self.length)
        return value


def cut_of(
    func: Any,
    tensors: Sequence[torch.Tensor],
    over: Sequence[Over],
    written: Sequence[torch.Tensor],
) -> Cut | None:
    """Return how an operator is cut, or None if it cannot be; see [Note: by slices].

    Args:
        func: the operator.
        tensors: its arguments.
        over: those of them over rows.
        written: those of them that it writes.
    """
    lead = max(over, key=lambda one: len(one.slices), default=None)
    if lead is None or len(lead.slices) < 2 or not is_by_element(func):
        return None
    shape, row = lead.plain.shape, lead.row
    step = lead.plain.stride(0) * lead.plain.element_size()
    length, rest = divmod(row.slice_bytes, step)
    begins = lead.plain.storage_offset() * lead.plain.element_size() % row.slice_bytes == 0
    if rest or not begins or shape[0] % length:
        return None
    for tensor in tensors:
        if tensor.shape == shape:
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                return None
        elif not _is_same_for_all(tensor.shape, shape):
            return None
    if any(tensor.shape != shape for tensor in written) or _overlap(over, written):
        return None
    exact = func in _COPYING or func in ZEROING
    if lead.plain.device.type == "cpu" and not exact:
        threads, count = torch.get_num_threads(), shape.numel()
        part = count // (shape[0] // length)
        if not (ends_evenly(count, threads) and ends_evenly(part, threads)):
            return None
    return Cut(shape, shape[0] // length, length)


def _overlap(over: Sequence[Over], written: Sequence[torch.Tensor]) -> bool:
    """Return whether an operator reads what it writes, at another offset or in another shape."""
    into = [one for one in over if any(one.given is other for other in written)]
    return any(
        one.row is other.row
        and one.slices
        and (one.plain.shape, one.plain.storage_offset())
        != (other.plain.shape, other.plain.storage_offset())
        for one in over
        for other in into
    )


def _is_same_for_all(shape: torch.Size, of: torch.Size) -> bool:
    """Return whether a tensor of ``shape`` is the same for all pieces of one of shape ``of``."""
    if len(shape) > len(of) or (len(shape) == len(of) and shape[0] != 1):
        return False
    ends = of[len(of) - len(shape) :]
    return all(size in (1, whole) for size, whole in zip(shape, ends, strict=True))
