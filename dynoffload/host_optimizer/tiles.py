"""Tiles: parts of masters and moments that are updated, uploaded or read from a file together.

A tile is a run of small parameters, or a slice of a large one. Tiles of a file pass through a few
reusable slots, read ahead and written behind. The slots' size does not depend on the file's
(ZeRO-Infinity, SC 2021, section 6.3).

[Note: where tiles may end]  The fused kernels compute whole vectors, from a tensor's first element
on. Remaining elements at its end are computed one by one, with different rounding. So a tensor cut
at multiples of the vector keeps the bits of the whole one; cut elsewhere, or joined with its
neighbour, it does not. Slices are multiples of 1024 elements, which also suits direct I/O. Small
parameters stay separate tensors within a tile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dynoffload.errors import BudgetError
from dynoffload.host_optimizer.link import Link
from dynoffload.host_optimizer.states import ELEMENT_BYTES, ParameterState, StateFile, padded
from dynoffload.units import format_bytes

_UNIT = 1024  # slices are multiples of this many elements
_SLOTS = 4
_THREADS = 2  # for reads and writes, whose time is mostly spent in the kernel


class Piece(NamedTuple):
    """Elements ``begin`` to ``end`` of a parameter, in the order of its memory."""

    state: ParameterState
    begin: int
    end: int


Views = list[dict[str, torch.Tensor]]
"""The master and the moments of each piece of a tile, flat, float32."""


@dataclass(eq=False, frozen=True)
class Tile:
    """Pieces that are updated together, all in memory or all in one file."""

    pieces: tuple[Piece, ...]

    @property
    def file(self) -> StateFile | None:
        """The file that stores it; None for memory."""
        return self.pieces[0].state.file

    @property
    def nbytes(self) -> int:
        """Bytes that it needs in a slot."""
        return sum(nbytes for *_, nbytes in self._sectors())

    def _sectors(self) -> Iterator[tuple[Piece, str, int]]:
        """Yield the tensors of the pieces, each with its bytes rounded up to whole sectors."""
        for piece in self.pieces:
            for key in piece.state.keys:
                yield piece, key, padded((piece.end - piece.begin) * ELEMENT_BYTES)

    def views(self, slot: torch.Tensor | None) -> Views:
        """Return all tensors of the tile, as views of ``slot`` if it is in a file."""
        if slot is None:
            return [{k: s.tensors[k][begin:end] for k in s.keys} for s, begin, end in self.pieces]
        found: dict[Piece, dict[str, torch.Tensor]] = {piece: {} for piece in self.pieces}
        at = 0
        for piece, key, nbytes in self._sectors():
            content = slot[at : at + (piece.end - piece.begin) * ELEMENT_BYTES]
            found[piece][key] = content.view(torch.float32)
            at += nbytes
        return list(found.values())

    def transfer(self, slot: torch.Tensor, *, reads: bool) -> None:
        """Read the tile from its file into ``slot``, or write it; merges adjacent transfers."""
        spans: list[list[int]] = []  # offset and bytes in the file; consecutive in the slot
        for (state, begin, _), key, nbytes in self._sectors():
            offset = state.offsets[key] + begin * ELEMENT_BYTES
            if spans and sum(spans[-1]) == offset:
                spans[-1][1] += nbytes
            else:
                spans.append([offset, nbytes])
        assert self.file is not None
        at = 0
        for offset, nbytes in spans:
            self.file.transfer(slot[at : at + nbytes], offset, reads=reads)
            at += nbytes


def tiles_of(states: Iterable[ParameterState], tile_bytes: int) -> list[Tile]:
    """Divide states that are all in memory, or all in one file, into tiles, in order.

    Args:
        states: of parameters.
        tile_bytes: the most bytes of masters in one tile; at least one unit is taken.
    """
    most = max(1, tile_bytes // ELEMENT_BYTES // _UNIT) * _UNIT
    found: list[Tile] = []
    run: list[Piece] = []
    taken = 0
    for state in states:
        in_file = state.file is not None
        room = padded(state.numel * ELEMENT_BYTES) // ELEMENT_BYTES if in_file else state.numel
        if run and taken + room > most:
            found.append(Tile(tuple(run)))
            run, taken = [], 0
        if state.numel > most:
            starts = range(0, state.numel, most)
            found += (Tile((Piece(state, at, min(at + most, state.numel)),)) for at in starts)
        elif state.numel:
            run.append(Piece(state, 0, state.numel))
            taken += room
    return [*found, Tile(tuple(run))] if run else found


class Staging:
    """Slots for the tiles of files; tiles in memory need none.

    Args:
        link: allocates their host memory.

    Attributes:
        nbytes: of all slots together.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.nbytes = link, 0
        self._memory: torch.Tensor | None = None
        self._workers = ThreadPoolExecutor(_THREADS, "dynoffload-states")

    def grow(self, nbytes: int) -> None:
        """Make each slot at least ``nbytes`` large.

        Raises:
            BudgetError: the host has too little memory.
        """
        if _SLOTS * nbytes <= self.nbytes:
            return
        try:
            with torch.inference_mode(False):
                memory = self._link.host(_SLOTS * nbytes)
        except MemoryError as error:
            raise BudgetError(
                f"the host has no {format_bytes(_SLOTS * nbytes)} through which masters and "
                "moments pass from and to their file: pass a smaller tile_bytes="
            ) from error
        self._release()
        self._memory, self.nbytes = memory, _SLOTS * nbytes

    def stage(self, tiles: Sequence[Tile]) -> Generator[tuple[Tile, Views], None, None]:
        """Yield each tile in memory; changes are written back by the end.

        Raises:
            SpillError: a file cannot be read or written.
        """
        coming = deque(tile for tile in tiles if tile.file is not None)
        moving: deque[tuple[torch.Tensor, Future[None]]] = deque()

        def move(slot: torch.Tensor, out: Tile | None) -> None:
            into = coming.popleft() if coming else None
            moving.append((slot, self._workers.submit(_exchange, slot, out, into)))

        try:
            for slot in () if self._memory is None else self._memory.chunk(_SLOTS):
                move(slot, None)
            for tile in tiles:
                if tile.file is None:
                    yield tile, tile.views(None)
                    continue
                slot, moved = moving.popleft()
                moved.result()
                yield tile, tile.views(slot)
                move(slot, tile)
            for _, moved in moving:
                moved.result()
        finally:
            wait([moved for _, moved in moving])

    def _release(self) -> None:
        if self._memory is not None:
            self._link.release(self._memory, held=False)
            self._memory = None

    def close(self) -> None:
        """Release the memory."""
        self._workers.shutdown()
        self._release()


def _exchange(slot: torch.Tensor, out: Tile | None, into: Tile | None) -> None:
    """Write the tile in a slot to its file, then read another into the slot."""
    if out is not None:
        out.transfer(slot, reads=False)
    if into is not None:
        into.transfer(slot, reads=True)
