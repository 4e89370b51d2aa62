"""Tiles: as much of masters and moments as is updated, uploaded or streamed at one time.

A tile is a run of small parameters, or a slice of a large one.

[Note: where tiles may end]  The fused kernels compute whole vectors, and what remains of a tensor,
fewer elements than a vector has, one by one, with other roundings. They begin at a tensor's first
element, wherever that lies in memory. So a tensor that is cut at multiples of the vector has the
bits of the whole one, and one that is cut elsewhere, or joined with its neighbour, has not: slices
are multiples of 1024 elements, which is also what direct I/O takes, and small parameters stay
tensors of their own within a tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dynoffload.optim.shelves import Entry, Shelf

UNIT = 1024
"""Elements that slices are multiples of."""

_ELEMENT = 4


class Piece(NamedTuple):
    """Elements ``begin`` to ``end`` of an entry, in the order of its memory."""

    entry: Entry
    begin: int
    end: int


class Stretch(NamedTuple):
    """Unbroken bytes of a shelf, and where they begin in a slot that has the tile alone."""

    begin: int
    nbytes: int
    packed: int


@dataclass(eq=False)
class Tile:
    """What is updated at one time.

    Attributes:
        shelf: where it lies.
        pieces: all of one shelf.
        stretches: of the shelf, that have all their bytes.
        nbytes: of the stretches together.
    """

    shelf: Shelf
    pieces: tuple[Piece, ...]
    stretches: tuple[Stretch, ...]
    nbytes: int

    def views(self, memory: torch.Tensor, *, packed: bool) -> list[dict[str, torch.Tensor]]:
        """Return the master and the moments of each piece, flat, float32.

        Args:
            memory: uint8, the shelf's own or a slot.
            packed: whether it is a slot, which has this tile alone.
        """
        found = []
        for piece in self.pieces:
            of_piece = {}
            for key in piece.entry.keys:
                begin = piece.entry.offsets[key] + piece.begin * _ELEMENT
                if packed:
                    begin = self._packed(begin)
                nbytes = (piece.end - piece.begin) * _ELEMENT
                of_piece[key] = memory[begin : begin + nbytes].view(torch.float32)
            found.append(of_piece)
        return found

    def _packed(self, offset: int) -> int:
        for stretch in self.stretches:
            if stretch.begin <= offset < stretch.begin + stretch.nbytes:
                return stretch.packed + offset - stretch.begin
        raise AssertionError("a piece lies outside of its tile")


def tiles_of(entries: Sequence[Entry], tile_bytes: int) -> list[Tile]:
    """Divide entries of one shelf into tiles, in their order.

    Args:
        entries: with elements each.
        tile_bytes: of masters, at most, in one tile; no fewer than one `UNIT` are taken.
    """
    most = max(1, tile_bytes // _ELEMENT // UNIT) * UNIT
    found: list[Tile] = []
    run: list[Entry] = []
    taken = 0

    def end_run() -> None:
        nonlocal taken
        if run:
            found.append(_tile(Piece(entry, 0, entry.numel) for entry in run))
            run.clear()
            taken = 0

    for entry in entries:
        room = entry.shelf.taken(entry.numel * _ELEMENT) // _ELEMENT
        if entry.numel > most:
            end_run()
            for begin in range(0, entry.numel, most):
                found.append(_tile([Piece(entry, begin, min(begin + most, entry.numel))]))
            continue
        if taken + room > most:
            end_run()
        run.append(entry)
        taken += room
    end_run()
    return found


def _tile(pieces: Iterable[Piece]) -> Tile:
    held = tuple(pieces)
    shelf = held[0].entry.shelf
    spans: list[list[int]] = []
    for entry, begin, end in held:
        for key in entry.keys:
            first = entry.offsets[key] + begin * _ELEMENT
            last = entry.offsets[key] + end * _ELEMENT
            if end == entry.numel:
                last = entry.offsets[key] + shelf.taken(entry.numel * _ELEMENT)
            if spans and spans[-1][1] == first:
                spans[-1][1] = last
            else:
                spans.append([first, last])
    stretches: list[Stretch] = []
    packed = 0
    for first, last in spans:
        stretches.append(Stretch(first, last - first, packed))
        packed += last - first
    return Tile(shelf, held, tuple(stretches), packed)
