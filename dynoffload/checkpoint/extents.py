"""Where in a whole tensor of a checkpoint lies what this process has of it.

A tensor that is spread over processes is a `DTensor`, which says itself what it is a part of, or
rows of experts, of which the layer knows (`dynoffload.moe.parallel.ExpertParallel`). Either is one
stretch along one dimension: an `Extent`.

[Note: rows]  Experts are found by their parameter, an object that stays while its memory comes and
goes. Optimizer state of a parameter's shape lies where the parameter does; a number is the same on
all ranks; state of any other shape has no known place in a whole, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from dynoffload.checkpoint.peers import Peers
from dynoffload.distributed.replicas import rows_of_experts
from dynoffload.errors import CheckpointError
from dynoffload.memory.local import is_spread, local


class Extent(NamedTuple):
    """A stretch of a whole tensor.

    Attributes:
        shape: of the whole.
        dim: along which it is cut.
        begin: the first index along ``dim`` that is here.
        writes: whether this process writes it, of those that have the same.
        several: whether others have the same.
    """

    shape: tuple[int, ...]
    dim: int
    begin: int
    writes: bool
    several: bool


@dataclass(frozen=True, eq=False)
class Held:
    """What this process has of a tensor of a checkpoint.

    Attributes:
        tensor: all of it, or its part.
        extent: of the part; None if it is all, which all processes have.
    """

    tensor: torch.Tensor
    extent: Extent | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(self.tensor.shape) if self.extent is None else self.extent.shape

    def stretches(
        self, *, writes: bool = False, first: bool = True
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what is here as unbroken runs of elements: where each begins, and its values.

        Args:
            writes: yield what this process is to write: of what several have, one writes it.
            first: whether it is the process that writes what all have.
        """
        tensor, extent = self.tensor.detach(), self.extent
        if extent is None:
            if first or not writes:
                yield 0, tensor
            return
        part: torch.Tensor = local(tensor)
        if not part.numel() or (writes and not extent.writes):
            return
        shape, dim, begin = extent.shape, extent.dim, extent.begin
        outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
        if outer == 1:  # of its own shape, as experts of one tensor may be paged each for itself
            yield begin * inner, part
            return
        flat, length = part.reshape(-1), part.shape[dim] * inner
        for row in range(outer):
            yield (row * shape[dim] + begin) * inner, flat[row * length : (row + 1) * length]


class Extents:
    """Where parts of the tensors of a model and its optimizer lie.

    Args:
        experts: of the parameters that are rows of experts; see [Note: rows].
    """

    def __init__(self, experts: Mapping[torch.Tensor, Extent]) -> None:
        self._experts = experts

    def of(self, tensor: torch.Tensor) -> Extent | None:
        """Return where a tensor of the model lies; None for one that is whole."""
        return _of_spread(tensor) if is_spread(tensor) else self._experts.get(tensor)

    def held(self, tensor: torch.Tensor) -> Held:
        """Return a tensor of the model with its extent."""
        return Held(tensor, self.of(tensor))

    def held_state(self, name: str, parameter: torch.Tensor, tensor: torch.Tensor) -> Held:
        """Return optimizer state of a parameter with its extent.

        Raises:
            CheckpointError: it is of rows of experts, whose place in a whole is not known.
        """
        extent = None if is_spread(tensor) else self._experts.get(parameter)
        if extent is None:
            return self.held(tensor)
        if tensor.shape == parameter.shape:
            return Held(tensor, extent)
        if tensor.numel() != 1:
            raise CheckpointError(
                f"optimizer state {name!r} has shape {list(tensor.shape)}, and its parameter, this "
                f"rank's experts, {list(parameter.shape)}: {UNPLACED}, or save without the "
                "optimizer"
            )
        return Held(tensor)


UNPLACED = (
    "where in that of all experts it belongs is known of state of the parameter's shape, and of "
    "numbers; use an optimizer that keeps such, as AdamW and SGD do"
)


def extents_of(model: nn.Module) -> Extents:
    """Return the extents of a model that is to be loaded."""
    return Extents(
        {
            parameter: _rows(parameter, begin, total, writes=False, several=False)
            for parameter, begin, total in rows_of_experts(model)
        }
    )


def agreed_extents(model: nn.Module, peers: Peers) -> Extents:
    """Return the extents of a model that is to be saved: of the ranks that have the same rows, the
    first writes. All ranks call it if one has rows of experts.

    Raises:
        CheckpointError: there are rows that no rank has, or ranks have other models.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows = list(rows_of_experts(model))
    if not rows:
        return Extents({})
    everyone = peers.share(
        lambda: {names[one]: [begin, begin + len(one), total] for one, begin, total in rows}
    )
    found: dict[torch.Tensor, Extent] = {}
    for parameter, begin, total in rows:
        name = names[parameter]
        claims = [one.get(name) for one in everyone]
        if any(claim is None or claim[2] != total for claim in claims):
            raise unlike()
        end = 0
        for first, last in sorted({(claim[0], claim[1]) for claim in claims}):
            if first != end:
                raise CheckpointError(
                    f"experts {min(end, first)} to {max(end, first)} of {name!r} are on no rank, "
                    "or in groups of other sizes: a checkpoint takes groups of one size, each of "
                    "which has all experts"
                )
            end = last
        if end != total:
            raise CheckpointError(
                f"experts {end} to {total} of {name!r} are on no rank that saves: all ranks of "
                "the group of their layer save together"
            )
        same = [rank for rank, claim in enumerate(claims) if claim[0] == begin]
        found[parameter] = _rows(
            parameter, begin, total, writes=same[0] == peers.rank, several=len(same) > 1
        )
    return Extents(found)


def unlike() -> CheckpointError:
    """Return the error for ranks that cannot have a checkpoint in common."""
    return CheckpointError(
        "the ranks have models, or optimizers, of other names, shapes or dtypes than each "
        "other: build them alike, and step them alike, before they save together"
    )


def _rows(
    parameter: torch.Tensor, begin: int, total: int, *, writes: bool, several: bool
) -> Extent:
    return Extent((total, *parameter.shape[1:]), 0, begin, writes, several)


# Tensors that say it themselves


def check_spread(name: str, tensor: torch.Tensor) -> None:
    """Refuse a spread tensor whose parts are not one stretch along one dimension.

    Raises:
        CheckpointError: naming it.
    """
    placements = tensor._spec.placements  # type: ignore[attr-defined]
    shards = [one for one in placements if one.is_shard()]
    plain = all(type(one).__name__ in ("Shard", "Replicate") for one in placements)
    if not plain or len(shards) > 1 or not local(tensor).is_contiguous():
        raise CheckpointError(
            f"tensor {name!r} is spread over processes as {placements}: a checkpoint holds what is "
            "sharded along one dimension, as by fully_shard alone"
        )


def _of_spread(tensor: torch.Tensor) -> Extent:
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    dim = next((one.dim for one in spec.placements if one.is_shard()), 0)
    begin = _begin(tensor.shape, spec, dim) if local(tensor).numel() else 0
    copies = [
        at for one, at in zip(spec.placements, spec.mesh.shape, strict=True) if one.is_replicate()
    ]
    several = any(size > 1 for size in copies)
    return Extent(tuple(tensor.shape), dim, begin, _writes(spec), several)


def _writes(spec: Any) -> bool:
    """Return whether this process is the one that writes its part, of those that have the same."""
    where = spec.mesh.get_coordinate() or ()
    return all(one.is_shard() or not at for one, at in zip(spec.placements, where, strict=True))


def _begin(shape: torch.Size, spec: Any, dim: int) -> int:
    """Return the first index along ``dim`` that this process has."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(shape, spec.mesh, spec.placements)
    return int(offset[dim])
