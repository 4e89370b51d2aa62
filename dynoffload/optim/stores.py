"""All that the optimizer holds: entries on their shelves, gradient memory, tiles, and their end.

What it is: what is taken in as parameters are added, and given back once at the end. What it is
not: a step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.queues import Moment, Queues
from dynoffload.optim.crew import Crew
from dynoffload.optim.departures import Departures
from dynoffload.optim.shelves import MASTER, Entry, Shelf, divide, flat, padded
from dynoffload.optim.staging import Staging
from dynoffload.optim.tiles import Tile, tiles_of
from dynoffload.units import format_bytes

_LINE = 64  # bytes that gradients begin at multiples of
_FLIGHTS = 4  # tiles of gradients that may be under way


class Stores:
    """Memory and threads of one optimizer; it outlives none of its parts.

    Args:
        queues: of the accelerator.
        crew: takes the memory, and updates.
        tile_bytes: of the masters in a tile.
        spill_dir: for masters and moments, or None.
        host_budget: bytes of memory for them where there is a file.
        on_host: updates are computed on the host, so gradients come here, and masters and moments
            need not be pinned.
        banks: of memory for gradients: two where one step's are read while the next come.

    Attributes:
        tiles: of all entries, in their order.
        departures: gradients on their way.
        staging: the way of files.
        gone: the moment at which shelves in memory have all that an accelerator made.
    """

    def __init__(
        self,
        queues: Queues,
        crew: Crew,
        *,
        tile_bytes: int,
        spill_dir: Path | None,
        host_budget: int | None,
        on_host: bool,
        banks: int,
    ) -> None:
        self._queues, self._crew = queues, crew
        self._tile_bytes, self._spill_dir = tile_bytes, spill_dir
        self._budget, self._on_host, self._count = host_budget, on_host, banks
        self._shelves: list[Shelf] = []
        self._banks: list[torch.Tensor] = []
        self.tiles: list[Tile] = []
        self.gone: Moment | None = None
        self.staging = Staging(queues, 0)
        self.departures = Departures(queues, tile_bytes, _FLIGHTS * tile_bytes)
        self._closed = False
        self._process = os.getpid()

    @property
    def memory_bytes(self) -> int:
        """Bytes of masters and moments in host memory."""
        return sum(shelf.nbytes for shelf in self._shelves if shelf.file is None)

    @property
    def file_bytes(self) -> int:
        """Bytes of masters and moments in files."""
        return sum(shelf.nbytes for shelf in self._shelves if shelf.file is not None)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of gradients in host memory."""
        return sum(bank.nbytes for bank in self._banks)

    def take_in(self, entries: Sequence[Entry]) -> None:
        """Give entries their places, and masters the values of their parameters.

        Raises:
            BudgetError: the host has no such memory; nothing was taken.
            SpillError: the directory cannot be used, or has no such room; nothing was taken.
        """
        left = None if self._budget is None else max(0, self._budget - self.memory_bytes)
        inside, outside = divide(entries, left, has_file=self._spill_dir is not None)
        made: list[Shelf] = []
        banks: list[torch.Tensor] = []
        try:
            for some, directory in ((inside, None), (outside, self._spill_dir)):
                if some:
                    pinned = None if self._on_host else self._queues
                    made.append(self._crew.do(Shelf, some, pinned, directory))
            if self._on_host:
                for _ in range(self._count):
                    banks.append(self._crew.do(self._bank, entries))
            tiles = [
                tile
                for some in (inside, outside)
                for tile in tiles_of([e for e in some if e.numel], self._tile_bytes)
            ]
            largest = max((t.nbytes for t in tiles if t.shelf.file is not None), default=0)
            self._stage(largest)
            for entry in entries:
                self._fill(entry)
            for shelf in made:
                shelf.sync()
        except BaseException:
            for bank in banks:
                self._queues.release(bank, held=False)
            for shelf in made:
                shelf.close()
            raise
        self._shelves += made
        self._banks += banks
        self.tiles += tiles

    def _stage(self, largest: int) -> None:
        if largest * 4 > self.staging.nbytes:
            self.staging.close()
            self.staging = self._crew.do(Staging, self._queues, largest)

    def _bank(self, entries: Sequence[Entry]) -> torch.Tensor:
        nbytes = sum(padded(entry.parameter.nbytes, _LINE) for entry in entries)
        try:
            with torch.inference_mode(False):
                bank = self._queues.host(max(1, nbytes))
        except MemoryError as error:
            raise BudgetError(
                f"the host has no {format_bytes(nbytes)} for the gradients of {len(entries)} "
                'parameters: free memory, or pass place="device", which leaves them there'
            ) from error
        offset = 0
        for entry in entries:
            taken = bank[offset : offset + entry.parameter.nbytes]
            entry.banks.append(taken.view(entry.parameter.dtype))
            offset += padded(entry.parameter.nbytes, _LINE)
        return bank

    @torch.no_grad()
    def _fill(self, entry: Entry) -> None:
        """Take the parameter's values over."""
        entry.flat(MASTER).copy_(flat(entry.parameter))
        entry.version = entry.parameter._version

    def settle(self) -> None:
        """Wait for what accelerators copy to shelves in memory."""
        if self.gone is not None:
            self.gone.wait()
            self.gone = None

    def sync(self) -> None:
        """What was written through maps of files is on their disks.

        Raises:
            SpillError: it cannot be written.
        """
        for shelf in self._shelves:
            shelf.sync()

    def close(self) -> None:
        """End threads, and give memory and files back; a forked process has none of them."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._crew.close()
        self.departures.close()
        self.settle()
        self.staging.close()
        self.tiles.clear()
        while self._banks:
            self._queues.release(self._banks.pop(), held=False)
        while self._shelves:
            self._shelves.pop().close()
