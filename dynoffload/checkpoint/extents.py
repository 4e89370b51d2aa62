"""Which part of a whole tensor of a checkpoint this process holds.

A distributed tensor is either a `DTensor`, whose spec gives its place, or rows of experts, whose
place the layer knows (`dynoffload.moe.parallel.ExpertParallel`). Either is one contiguous range
along one dimension: an `Extent`.

[Note: rows]  Extents of experts are keyed by the parameter object, which persists while its memory
is evicted and fetched. Optimizer state of the parameter's shape has the same extent. A single
number is the same on all ranks. State of any other shape is refused, since its place is unknown.
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
    """A contiguous range of a whole tensor along one dimension.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension that is split.
        begin: the first index along ``dim`` in this process.
        writes: whether this process, of all that hold the range, writes it.
        several: whether other processes hold the same range.
    """

    shape: tuple[int, ...]
    dim: int
    begin: int
    writes: bool = False
    several: bool = False


@dataclass(frozen=True, eq=False)
class Held:
    """The part of a checkpoint's tensor that this process holds.

    Attributes:
        tensor: the whole tensor, or the part.
        extent: of the part; None if the tensor is whole, as on every process.
    """

    tensor: torch.Tensor
    extent: Extent | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape) if self.extent is None else self.extent.shape

    @property
    def span(self) -> tuple[int, int] | None:
        """The range [begin, end) along the split dimension that this process writes; None if it
        writes none, or if the tensor is whole."""
        if self.extent is None or not self.extent.writes:
            return None
        shape = local(self.tensor).shape
        length = shape[self.extent.dim] if shape else 1
        if not length:
            return None
        return self.extent.begin, self.extent.begin + length

    def stretches(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield contiguous runs of elements: the offset in the whole tensor, and the values."""
        if self.extent is None:
            yield 0, self.tensor.detach()
            return
        part: torch.Tensor = local(self.tensor.detach())
        if not part.numel():
            return
        shape, dim, begin = self.extent[:3]
        outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
        if outer == 1:  # keeps its shape, as experts of one tensor may be paged separately
            yield begin * inner, part
            return
        flat, length = part.reshape(-1), part.shape[dim] * inner
        for row in range(outer):
            yield (row * shape[dim] + begin) * inner, flat[row * length : (row + 1) * length]


class Extents(dict[torch.Tensor, Extent]):
    """Extents by parameter, for parameters that are rows of experts; see [Note: rows]."""

    def held(self, tensor: torch.Tensor, of: torch.Tensor) -> Held:
        """Return a tensor with its extent.

        Args:
            tensor: a parameter or buffer, or optimizer state.
            of: the tensor itself, or the parameter whose state it is.
        """
        if is_spread(tensor):
            return Held(tensor, _dtensor_extent(tensor))
        return Held(tensor, self.get(of) if tensor.shape == of.shape else None)


def extents_of(model: nn.Module) -> Extents:
    """Return the extents of a model to load; nothing is marked for writing."""
    return Extents(
        (parameter, Extent((total, *parameter.shape[1:]), 0, begin))
        for parameter, begin, total in rows_of_experts(model)
    )


def agreed_extents(model: nn.Module, peers: Peers) -> Extents:
    """Return the extents of a model to save. Of the ranks that hold the same rows, the first
    writes them. Collective: all ranks must call it."""
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
    """Check that a tensor has plain dense storage, and that a distributed one is a single range.

    Raises:
        CheckpointError: it does not; names the tensor.
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


def _dtensor_extent(tensor: torch.Tensor) -> Extent:
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
