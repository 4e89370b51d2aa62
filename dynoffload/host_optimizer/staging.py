"""The way of tiles from a file to the update and back, through a few reusable slots.

Tiles are read ahead, and written behind the one that is updated. All slots together are of one
size, however much the file holds (ZeRO-Infinity, SC 2021, section 6.3). Tiles in memory need none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from dynoffload.errors import BudgetError
from dynoffload.host_optimizer.link import Link
from dynoffload.host_optimizer.tiles import Piece, Tile
from dynoffload.units import format_bytes

SLOTS = 4
_THREADS = 2  # that read and write; the kernel's own work is the longer part


class StagedTile(NamedTuple):
    """A tile in memory.

    Attributes:
        tile: which one.
        pieces: of the tile, each with its master and moments, flat, float32.
    """

    tile: Tile
    pieces: list[tuple[Piece, dict[str, torch.Tensor]]]


class _Transfer(NamedTuple):
    slot: torch.Tensor
    done: Future[None]


class Staging:
    """Slots for the tiles of files.

    Args:
        link: whose host memory they are.
        nbytes: of the largest tile of a file; 0 where there is none.

    Attributes:
        nbytes: of all slots together.

    Raises:
        BudgetError: the host has no such memory.
    """

    def __init__(self, link: Link, nbytes: int) -> None:
        self._link = link
        self.nbytes = SLOTS * nbytes
        self._slots: list[torch.Tensor] = []
        self._workers = ThreadPoolExecutor(_THREADS, "dynoffload-states")
        try:
            with torch.inference_mode(False):
                self._slots = [link.host(nbytes) for _ in range(SLOTS if nbytes else 0)]
        except MemoryError as error:
            raise BudgetError(
                f"the host has no {format_bytes(self.nbytes)} through which masters and moments "
                "pass from and to their file: pass a smaller tile_bytes="
            ) from error

    def stage(self, tiles: Sequence[Tile]) -> Generator[StagedTile, None, None]:
        """Yield each tile in memory; what was changed of it is in its buffer by the end.

        Raises:
            SpillError: a file cannot be read or written.
        """
        coming = deque(tile for tile in tiles if tile.buffer.file is not None)
        free = deque(self._slots)
        ahead: deque[_Transfer] = deque()
        behind: deque[_Transfer] = deque()

        def read_ahead() -> None:
            while behind and (behind[0].done.done() or not (free or ahead)):
                slot, written = behind.popleft()
                written.result()
                free.append(slot)
            while coming and free:
                ahead.append(self._transfer(coming.popleft(), free.popleft(), reads=True))

        try:
            for tile in tiles:
                slot: torch.Tensor | None = None
                if tile.buffer.file is not None:
                    read_ahead()
                    slot, read = ahead.popleft()
                    read.result()
                yield StagedTile(tile, list(zip(tile.pieces, tile.views(slot), strict=True)))
                if slot is not None:
                    behind.append(self._transfer(tile, slot, reads=False))
            for _, written in behind:
                written.result()
        finally:
            wait([one.done for one in (*ahead, *behind)])

    def _transfer(self, tile: Tile, slot: torch.Tensor, *, reads: bool) -> _Transfer:
        return _Transfer(slot, self._workers.submit(_move, tile, slot, reads))

    def close(self) -> None:
        """Give the memory back."""
        self._workers.shutdown()
        while self._slots:
            self._link.release(self._slots.pop(), held=False)


def _move(tile: Tile, slot: torch.Tensor, reads: bool) -> None:
    for begin, nbytes, in_slot in tile.stretches:
        tile.buffer.transfer(slot[in_slot : in_slot + nbytes], begin, reads=reads)
