"""What tensors are made of in weight files: parts, each a piece of a file's tensor.

A part has the same elements in both places, in the same order. So one slice of a parameter is read
from the parts that lie in it, without the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

Shape = tuple[int, ...]
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Conversion:
    """A tensor that a function makes of whole tensors of the files.

    Attributes:
        names: of the tensors in the files.
        make: called with these tensors, in the order of their names.
    """

    names: tuple[str, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Part(NamedTuple):
    """A part of a tensor, and the piece of a file's tensor that it equals.

    Attributes:
        at: index in the tensor, one entry per dimension. A dimension with a number is not in the
            file's tensor.
        source: name of the file's tensor; or the tensor that is made of several.
        piece: index in the source: the slices that correspond to those in ``at``.
    """

    at: tuple[int | slice, ...]
    source: str | Conversion
    piece: tuple[slice, ...]


class FileValue(NamedTuple):
    """The value of a tensor in the files.

    Attributes:
        shape: of the tensor.
        parts: that cover it without overlap, in row-major order of where they begin.
    """

    shape: Shape
    parts: tuple[Part, ...]

    def narrowed(self, dim: int, start: int, stop: int) -> FileValue:
        """Return the value of ``tensor.narrow(dim, start, stop - start)``."""
        found = []
        for part in self.parts:
            index, piece = part.at[dim], part.piece
            if isinstance(index, int):
                if not start <= index < stop:
                    continue
                moved: int | slice = index - start
            else:
                first, last = max(index.start, start), min(index.stop, stop)
                if first >= last:
                    continue
                moved = slice(first - start, last - start)
                axis = sum(isinstance(one, slice) for one in part.at[:dim])
                begin = piece[axis].start - index.start
                piece = _with(piece, axis, slice(begin + first, begin + last))
            found.append(Part(_with(part.at, dim, moved), part.source, piece))
        return FileValue(_with(self.shape, dim, stop - start), tuple(found))

    def rows(self) -> list[FileValue]:
        """Return the value of each ``tensor[n : n + 1]``, in one pass."""
        found: list[list[Part]] = [[] for _ in range(self.shape[0])]
        for part in self.parts:
            at = part.at[0]
            for n in (at,) if isinstance(at, int) else range(at.start, at.stop):
                found[n] += FileValue(self.shape, (part,)).narrowed(0, n, n + 1).parts
        return [FileValue((1, *self.shape[1:]), tuple(parts)) for parts in found]

    def indexed(self, index: Sequence[slice]) -> FileValue:
        """Return the value of ``tensor[index]``, for slices of step 1."""
        value = self
        for dim, one in enumerate(index):
            start, stop, _ = one.indices(value.shape[dim])
            value = value.narrowed(dim, start, stop)
        return value


def run_of(shape: Shape, index: Sequence[int | slice]) -> tuple[int, int] | None:
    """Return the first element of ``tensor[index]`` in a contiguous tensor of ``shape``, and how
    many elements follow on each other from there; None if they do not. Slices have step 1."""
    first, count, rest = 0, 1, True  # whether all later dimensions are whole
    step = 1
    for size, one in zip(reversed(shape), reversed(index), strict=True):
        start, stop = (one, one + 1) if isinstance(one, int) else (one.start, one.stop)
        if not rest and stop - start != 1:
            return None
        rest = rest and stop - start == size
        first, count, step = first + start * step, count * (stop - start), step * size
    return first, count


def whole(source: str | Conversion, shape: Shape) -> FileValue:
    """Return the value of a tensor that equals ``source``."""
    all_of = tuple(slice(0, size) for size in shape)
    return FileValue(shape, (Part(all_of, source, all_of),))


def stacked(values: Sequence[FileValue], dim: int) -> FileValue:
    """Return the value of ``torch.stack``."""
    shape = values[0].shape
    parts = [
        part._replace(at=(*part.at[:dim], number, *part.at[dim:]))
        for number, value in enumerate(values)
        for part in value.parts
    ]
    return _ordered((*shape[:dim], len(values), *shape[dim:]), parts)


def concatenated(values: Sequence[FileValue], dim: int) -> FileValue:
    """Return the value of ``torch.cat``."""
    parts, size = [], 0
    for value in values:
        for part in value.parts:
            at = part.at[dim]
            moved = at + size if isinstance(at, int) else slice(at.start + size, at.stop + size)
            parts.append(part._replace(at=_with(part.at, dim, moved)))
        size += value.shape[dim]
    return _ordered(_with(values[0].shape, dim, size), parts)


def _ordered(shape: Shape, parts: Sequence[Part]) -> FileValue:
    def begins(part: Part) -> list[int]:
        return [one if isinstance(one, int) else one.start for one in part.at]

    return FileValue(shape, tuple(sorted(parts, key=begins)))


def _with(entries: tuple[_Entry, ...], place: int, entry: _Entry) -> tuple[_Entry, ...]:
    return (*entries[:place], entry, *entries[place + 1 :])
