"""Where in a whole tensor of a checkpoint lies what this process has of it.

A tensor that is spread over processes is a `DTensor`, which says itself what it is a part of, or
rows of experts, of which the layer knows (`dynoffload.moe.parallel.ExpertParallel`). Either is one
stretch along one dimension: an `Extent`.

[Note: rows]  Experts are found by their parameter, an object that stays while its memory comes and
goes. Optimizer state of a parameter's shape lies where the parameter does; a number is the same on
all ranks; state of any other shape has no known place in a whole, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from dynoffload.checkpoint.peers import Peers
from dynoffload.distributed.replicas import rows_of_experts
from dynoffload.errors import CheckpointError
from dynoffload.memory.local import is_spread, local

UNPLACED = (
    "where in that of all experts it belongs is known of state of the parameter's shape, and of "
    "numbers; use an optimizer that keeps such, as AdamW and SGD do"
)


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
    writes: bool = False
    several: bool = False


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

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last index along the dimension that this process is to write; None
        for none, and for a tensor that is whole."""
        if self.extent is None or not self.extent.writes:
            return None
        shape = local(self.tensor).shape
        length = shape[self.extent.dim] if shape else 1
        if not length:
            return None
        return self.extent.begin, self.extent.begin + length

    def stretches(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what is here as unbroken runs of elements: where each begins, and its values."""
        if self.extent is None:
            yield 0, self.tensor.detach()
            return
        part: torch.Tensor = local(self.tensor.detach())
        if not part.numel():
            return
        shape, dim, begin = self.extent[:3]
        outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
        if outer == 1:  # of its own shape, as experts of one tensor may be paged each for itself
            yield begin * inner, part
            return
        flat, length = part.reshape(-1), part.shape[dim] * inner
        for row in range(outer):
            yield (row * shape[dim] + begin) * inner, flat[row * length : (row + 1) * length]


class Extents(dict[torch.Tensor, Extent]):
    """Of the parameters that are rows of experts, their extents; see [Note: rows]."""

    def held(self, tensor: torch.Tensor, of: torch.Tensor) -> Held:
        """Return a tensor with its extent.

        Args:
            tensor: a parameter or buffer, or optimizer state.
            of: the tensor itself, or the parameter whose state it is.
        """
        if is_spread(tensor):
            return Held(tensor, _of_spread(tensor))
        return Held(tensor, self.get(of) if tensor.shape == of.shape else None)


def extents_of(model: nn.Module) -> Extents:
    """Return the extents of a model that is to be loaded."""
    return Extents(
        (parameter, Extent((total, *parameter.shape[1:]), 0, begin))
        for parameter, begin, total in rows_of_experts(model)
    )


def agreed_extents(model: nn.Module, peers: Peers) -> Extents:
    """Return the extents of a model that is to be saved: of the ranks that have the same rows, the
    first writes. All ranks call it."""
    names: dict[torch.Tensor, str] = {one: name for name, one in model.named_parameters()}
    found = extents_of(model)
    everyone = peers.share(lambda: {names[one]: extent.begin for one, extent in found.items()})
    for parameter, extent in found.items():
        same = [
            rank
            for rank, begins in enumerate(everyone)
            if begins.get(names[parameter]) == extent.begin
        ]
        found[parameter] = extent._replace(writes=same[0] == peers.rank, several=len(same) > 1)
    return found


def check_savable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no bytes of its own, and parts that are not one stretch.

    Raises:
        CheckpointError: naming it.
    """
    if is_spread(tensor):
        placements = tensor._spec.placements  # type: ignore[attr-defined]
        tensor = local(tensor)
        plain = all(type(one).__name__ in ("Shard", "Replicate") for one in placements)
        cut = sum(one.is_shard() for one in placements)
        if not plain or cut > 1 or not tensor.is_contiguous():
            raise CheckpointError(
                f"tensor {name!r} is spread over processes as {placements}: a checkpoint holds "
                "what is sharded along one dimension, as by fully_shard alone"
            )
    what = ""
    if tensor.layout != torch.strided:
        what = f"of layout {tensor.layout}"
    elif hasattr(tensor, "__tensor_flatten__"):
        what = f"a {type(tensor).__name__}, which wraps other tensors"
    elif tensor.is_quantized:
        what = "quantized"
    elif tensor.is_meta:
        what = "on the meta device"
    if what:
        raise CheckpointError(
            f"tensor {name!r} is {what}: a checkpoint holds dense tensors that have content; "
            "convert it first"
        )


def _of_spread(tensor: torch.Tensor) -> Extent:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = tensor._spec  # type: ignore[attr-defined]
    mesh, placements = spec.mesh, spec.placements
    dim = next((one.dim for one in placements if one.is_shard()), 0)
    begin = 0
    if local(tensor).numel():
        begin = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)[1][dim]
    copies = [at for at, one in enumerate(placements) if one.is_replicate()]
    where = mesh.get_coordinate() or (0,) * len(placements)
    return Extent(
        tuple(tensor.shape),
        dim,
        begin,
        writes=not any(where[at] for at in copies),
        several=any(mesh.shape[at] > 1 for at in copies),
    )
