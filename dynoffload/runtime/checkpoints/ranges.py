"""Which bytes of a tensor in a file are this process's, and the checksum of a file of such parts.

A checkpoint has whole tensors, so that any number of processes can load it. Of a tensor that is
spread over processes each has some rows, or some columns of each row, which lie in the file where
they would if one process had written all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch

from dynoffload.memory.local import local
from dynoffload.runtime.checkpoints.extents import Held

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


def parts_of(held: Held, *, writes: bool = False, first: bool = True) -> Iterator[Part]:
    """Yield what this process has of a tensor, in the order of its elements.

    Args:
        held: a tensor that all have, or a part.
        writes: yield what it is to write: of what several have, only one does.
        first: whether it is the process that writes what all have.
    """
    tensor, extent = held.tensor.detach(), held.extent
    if extent is None:
        if first or not writes:
            yield Part(0, tensor)
        return
    part: torch.Tensor = local(tensor)
    if not part.numel() or (writes and not extent.writes):
        return
    shape, dim, begin = extent.shape, extent.dim, extent.begin
    outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
    if outer == 1:  # of its own shape, as experts of one tensor may be paged each for itself
        yield Part(begin * inner, part)
        return
    flat, length = part.reshape(-1), part.shape[dim] * inner
    for row in range(outer):
        yield Part((row * shape[dim] + begin) * inner, flat[row * length : (row + 1) * length])


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
