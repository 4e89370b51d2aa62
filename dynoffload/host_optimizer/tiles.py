"""Tiles: as much of masters and moments as is updated, uploaded or read from a file at one time.

A tile is a run of small parameters, or a slice of a large one.

[Note: where tiles may end]  The fused kernels compute whole vectors, from a tensor's first element
on. The fewer elements that remain at its end are computed one by one, with other roundings. So a
tensor that is cut at multiples of the vector has the bits of the whole one, and one that is cut
elsewhere, or joined with its neighbour, has not. Slices are multiples of 1024 elements, which is
also what direct I/O takes, and small parameters stay tensors of their own within a tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dynoffload.host_optimizer.state_buffers import ELEMENT_BYTES, ParameterState, StateBuffer

UNIT = 1024
"""Elements that slices are multiples of."""


class Piece(NamedTuple):
    """Elements ``begin`` to ``end`` of a parameter, in the order of its memory."""

    state: ParameterState
    begin: int
    end: int


class Stretch(NamedTuple):
    """Unbroken bytes of a buffer, and where they begin in a slot that holds one tile."""

    begin: int
    nbytes: int
    in_slot: int


@dataclass(eq=False)
class Tile:
    """What is updated at one time.

    Attributes:
        buffer: where it lies.
        pieces: all of one buffer.
        stretches: of the buffer, that hold all bytes of the pieces.
        nbytes: of the stretches together.
    """

    buffer: StateBuffer
    pieces: tuple[Piece, ...]
    stretches: tuple[Stretch, ...]
    nbytes: int

    def views(self, slot: torch.Tensor | None) -> list[dict[str, torch.Tensor]]:
        """Return the master and the moments of each piece, flat, float32.

        Args:
            slot: uint8, which holds this tile; None: they are where they lie in the buffer.
        """
        found = []
        for state, first, last in self.pieces:
            of_piece = {}
            for key in state.keys:
                begin = state.offsets[key] + first * ELEMENT_BYTES
                if slot is not None:
                    begin = self._in_slot(begin)
                end = begin + (last - first) * ELEMENT_BYTES
                memory = self.buffer.memory if slot is None else slot
                of_piece[key] = memory[begin:end].view(torch.float32)
            found.append(of_piece)
        return found

    def _in_slot(self, offset: int) -> int:
        begin, _, in_slot = next(
            one for one in self.stretches if one.begin <= offset < one.begin + one.nbytes
        )
        return in_slot + offset - begin


def tiles_of(states: Sequence[ParameterState], tile_bytes: int) -> list[Tile]:
    """Divide the states of one buffer into tiles, in their order.

    Args:
        states: of parameters with elements.
        tile_bytes: of masters, at most, in one tile; no fewer than one `UNIT` are taken.
    """
    most = max(1, tile_bytes // ELEMENT_BYTES // UNIT) * UNIT
    found: list[Tile] = []
    run: list[Piece] = []
    taken = 0
    for state in states:
        room = state.buffer.padded(state.numel * ELEMENT_BYTES) // ELEMENT_BYTES
        if run and taken + room > most:
            found.append(_tile(run))
            run, taken = [], 0
        if state.numel > most:
            for begin in range(0, state.numel, most):
                found.append(_tile([Piece(state, begin, min(begin + most, state.numel))]))
            continue
        run.append(Piece(state, 0, state.numel))
        taken += room
    return [*found, _tile(run)] if run else found


def _tile(pieces: Iterable[Piece]) -> Tile:
    held = tuple(pieces)
    buffer = held[0].state.buffer
    spans: list[list[int]] = []
    for state, begin, end in held:
        for key in state.keys:
            first = state.offsets[key] + begin * ELEMENT_BYTES
            last = state.offsets[key] + end * ELEMENT_BYTES
            if end == state.numel:
                last = state.offsets[key] + buffer.padded(state.numel * ELEMENT_BYTES)
            if spans and spans[-1][1] == first:
                spans[-1][1] = last
            else:
                spans.append([first, last])
    stretches: list[Stretch] = []
    nbytes = 0
    for first, last in spans:
        stretches.append(Stretch(first, last - first, nbytes))
        nbytes += last - first
    return Tile(buffer, held, tuple(stretches), nbytes)
