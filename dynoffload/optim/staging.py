"""The way of tiles from a file to whoever updates them, and back, through a few reusable slots.

Those of a shelf in memory are where they are. Of a file, tiles are read ahead into slots, and
written behind, while the one in between is updated; all slots together are as large as they are
made, however much the file holds (ZeRO-Infinity, SC 2021, section 6.3: "small reusable buffers").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.queues import Moment, Queues
from dynoffload.optim.tiles import Tile
from dynoffload.units import format_bytes

SLOTS = 4
_THREADS = 2  # that read and write; the kernel's own work is the longer part


@dataclass(eq=False)
class Lease:
    """A tile at hand.

    Attributes:
        tile: which one.
        memory: uint8; its shelf's, or a slot.
        packed: whether it is a slot.
        gone: the moment from which on the memory may be written to the file; None: at once.
    """

    tile: Tile
    memory: torch.Tensor
    packed: bool
    gone: Moment | None = None


class Staging:
    """Slots for the tiles of files.

    Args:
        queues: whose host memory they are.
        nbytes: of the largest tile of a file; 0 where there is none.

    Attributes:
        nbytes: of all slots together.
        bytes_read, bytes_written: from and to files, so far.

    Raises:
        BudgetError: the host has no such memory.
    """

    def __init__(self, queues: Queues, nbytes: int) -> None:
        self._queues = queues
        self.nbytes = SLOTS * nbytes
        self._slots: list[torch.Tensor] = []
        self._workers: ThreadPoolExecutor | None = None
        self.bytes_read = self.bytes_written = 0
        if not nbytes:
            return
        try:
            with torch.inference_mode(False):
                self._slots = [queues.host(nbytes) for _ in range(SLOTS)]
        except MemoryError as error:
            raise BudgetError(
                f"the host has no {format_bytes(self.nbytes)} through which masters and moments "
                "pass from and to their file: pass a smaller tile_bytes="
            ) from error
        self._workers = ThreadPoolExecutor(_THREADS, "dynoffload-states")

    def through(
        self, tiles: Sequence[Tile], *, writes: bool = True
    ) -> Generator[Lease, None, None]:
        """Yield each tile at hand; what was made of it is on its shelf by the end.

        Args:
            tiles: in their order.
            writes: they are changed.

        Raises:
            SpillError: a file cannot be read or written.
        """
        coming = deque(tile for tile in tiles if tile.shelf.file is not None)
        free = deque(self._slots)
        reads: deque[tuple[torch.Tensor, Future[None]]] = deque()
        behind: deque[tuple[torch.Tensor, Future[None]]] = deque()

        def end_first() -> None:
            slot, written = behind.popleft()
            written.result()
            free.append(slot)

        def read_ahead() -> None:
            while behind and behind[0][1].done():
                end_first()
            while coming and free:
                slot = free.popleft()
                reads.append((slot, self._give(coming.popleft(), slot)))

        try:
            for tile in tiles:
                if tile.shelf.file is None:
                    yield Lease(tile, tile.shelf.memory, packed=False)
                    continue
                read_ahead()
                if not reads:
                    end_first()
                    read_ahead()
                slot, read = reads.popleft()
                read.result()
                self.bytes_read += tile.nbytes
                lease = Lease(tile, slot, packed=True)
                yield lease
                if writes:
                    behind.append((slot, self._give(tile, slot, lease)))
                    self.bytes_written += tile.nbytes
                else:
                    free.append(slot)
            while behind:
                end_first()
        finally:
            wait([future for _, future in (*reads, *behind)])

    def _give(self, tile: Tile, slot: torch.Tensor, lease: Lease | None = None) -> Future[None]:
        assert self._workers is not None
        return self._workers.submit(self._carry, tile, slot, lease)

    def _carry(self, tile: Tile, slot: torch.Tensor, lease: Lease | None) -> None:
        """Read a tile, or write what a lease has made of it."""
        if lease is not None and lease.gone is not None:
            lease.gone.wait()
        for begin, nbytes, packed in tile.stretches:
            content = slot[packed : packed + nbytes]
            tile.shelf.transfer(content, begin, reads=lease is None)

    def close(self) -> None:
        """Give the memory back."""
        if self._workers is not None:
            self._workers.shutdown()
        while self._slots:
            self._queues.release(self._slots.pop(), held=False)
