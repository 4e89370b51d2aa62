"""Which bytes of a tensor in a file are this process's, and the checksum of a file of such parts.

A checkpoint has whole tensors, so that any number of processes can load it. Of a tensor that is
spread over processes each has some rows, or some columns of each row, which lie in the file where
they would if one process had written all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from dynoffload.errors import CheckpointError
from dynoffload.memory.local import is_spread, local

_POLYNOMIAL = 0xEDB88320  # of CRC-32, as zlib has it
_BITS = 32


class Part(NamedTuple):
    """A stretch of a tensor: where it begins, in elements, and what lies there."""

    start: int
    values: torch.Tensor


class Span(NamedTuple):
    """A stretch of a file: where it begins, its bytes, and their checksum."""

    start: int
    nbytes: int
    crc32: int


def parts_of(tensor: torch.Tensor, *, writes: bool = False, first: bool = True) -> Iterator[Part]:
    """Yield what this process has of ``tensor``, in the order of its elements.

    Args:
        tensor: plain, or spread.
        writes: yield what it is to write: of what several have, only one does.
        first: whether it is the process that writes what is not spread.
    """
    if not is_spread(tensor):
        if first or not writes:
            yield Part(0, tensor.detach())
        return
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    part = local(tensor.detach())
    if not part.numel() or (writes and not _writes(spec)):
        return
    dim = next((one.dim for one in spec.placements if one.is_shard()), 0)
    begin = _begin(tensor.shape, spec, dim)
    outer, inner = prod(tensor.shape[:dim]), prod(tensor.shape[dim + 1 :])
    flat, length = part.reshape(-1), part.shape[dim] * inner
    for row in range(outer):
        start = (row * tensor.shape[dim] + begin) * inner
        yield Part(start, flat[row * length : (row + 1) * length])


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


def _writes(spec: Any) -> bool:
    """Return whether this process is the one that writes its part, of those that have the same."""
    where = spec.mesh.get_coordinate() or ()
    return all(one.is_shard() or not at for one, at in zip(spec.placements, where, strict=True))


def _begin(shape: torch.Size, spec: Any, dim: int) -> int:
    """Return the first index along ``dim`` that this process has."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(shape, spec.mesh, spec.placements)
    return int(offset[dim])


def joined(spans: Iterable[Span]) -> Span:
    """Return the span of a file from the spans of all its stretches, in any order.

    Raises:
        ValueError: a stretch is missing, or is there twice.
    """
    end = checksum = 0
    for span in sorted(span for span in spans if span.nbytes):
        if span.start != end:
            raise ValueError(f"bytes {end} to {span.start} were written by nobody, or twice")
        checksum = _after(checksum, span.nbytes) ^ span.crc32
        end += span.nbytes
    return Span(0, end, checksum)


# The checksum of two stretches, one after the other, from those of each: that of the first is moved
# on by as many zeros as the second has bytes, which is a product with a matrix over bits; see
# ``crc32_combine`` of zlib, https://github.com/madler/zlib/blob/v1.2.11/crc32.c.


def _after(checksum: int, nbytes: int) -> int:
    """Return ``checksum`` moved on by ``nbytes`` zeros."""
    power = 0
    while nbytes:
        if nbytes & 1:
            checksum = _times(_zeros(power), checksum)
        nbytes >>= 1
        power += 1
    return checksum


@functools.cache
def _zeros(power: int) -> tuple[int, ...]:
    """Return the columns of the matrix that moves a checksum on by 2**power bytes of zeros."""
    if power:
        half = _zeros(power - 1)
        return tuple(_times(half, column) for column in half)
    bit = (_POLYNOMIAL, *(1 << number for number in range(_BITS - 1)))
    columns = bit
    for _ in range(3):  # one bit, two, four, eight
        columns = tuple(_times(columns, column) for column in columns)
    return columns


def _times(columns: tuple[int, ...], vector: int) -> int:
    product, number = 0, 0
    while vector:
        if vector & 1:
            product ^= columns[number]
        vector >>= 1
        number += 1
    return product
