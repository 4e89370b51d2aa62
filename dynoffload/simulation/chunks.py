"""Chunks of a simulated step's saved activations, filled in order as in the runtime.

`Chunks` mirrors the accounting of `dynoffload.runtime.passes.activations`, by sizes alone: the
chunk that holds each storage, when a chunk ends, and which chunk is opened next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynoffload.simulation.overhead import Division
from dynoffload.simulation.pager import SimulatedPager

ALIGNMENT = 64
"""Alignment, in bytes, of the storages in a chunk."""


@dataclass(eq=False)
class _Chunk:
    index: int  # -1 if it holds a single large storage
    region: int
    size: int
    filled: int = 0
    live: int = 0
    open: bool = True


class Chunks:
    """The chunks of one training run.

    Args:
        pager: the pager that holds them.
        sizes: how the budget is divided.
        on_open: called with the region of each chunk that is opened.

    Attributes:
        most_kept: peak bytes of storages saved in place.
    """

    def __init__(
        self, pager: SimulatedPager, sizes: Division, on_open: Callable[[int], None]
    ) -> None:
        self._pager, self._sizes, self._on_open = pager, sizes, on_open
        self._regions: list[int] = []
        self._free: list[int] = []  # indices, highest first
        self._current: _Chunk | None = None
        self._where: dict[int, _Chunk | None] = {}  # storage -> its chunk, None if in place
        self._nbytes: dict[int, int] = {}
        self._ended: list[int] = []
        self._kept = self.most_kept = 0
        self._taken = 0
        self._last = -1

    def next_regions(self, count: int) -> list[int]:
        """Return the regions of the next ``count`` chunks to be opened."""
        self.settle()
        while len(self._free) < count:
            self._make()
        return [self._regions[index] for index in self._free[::-1][:count]]

    def _make(self) -> None:
        self._free.insert(0, len(self._regions))
        self._regions.append(self._pager.allocate(self._sizes.chunk_bytes, extra=True))

    def take_saved(self) -> int:
        """Return the bytes filled, or left over in a full chunk, since the last call."""
        taken, self._taken = self._taken, 0
        return taken

    def save(self, storage: int, nbytes: int, whole: int, *, own: bool = False) -> int:
        """Save a storage; return the bytes that are copied.

        Args:
            storage: its number.
            nbytes: its bytes.
            whole: bytes of the storage it is a part of, which decide whether it stays in place.
            own: whether it belongs to the model and is not counted here if it stays in place.
        """
        self.settle()
        more = self._nbytes[storage] = 0 if own else nbytes
        small = whole < self._sizes.min_moved_bytes
        if not nbytes or (small and self._kept + more <= self._sizes.kept_bytes):
            self._where[storage] = None
            self._kept += more
            self.most_kept = max(self.most_kept, self._kept)
            return 0
        chunk = self._place(nbytes)
        chunk.live += 1
        self._where[storage] = chunk
        self._taken += nbytes
        self._pager.access([chunk.region])
        if chunk.index < 0:
            self._shut(chunk)
        return nbytes

    def _place(self, nbytes: int) -> _Chunk:
        whole = self._sizes.chunk_bytes
        if nbytes > whole:
            if self._pager.padded(nbytes) + whole > self._pager.machine.fast_bytes:
                self._shut_current()
            return self._open(nbytes)
        chunk = self._current
        if chunk is None or chunk.filled + nbytes > chunk.size:
            if chunk is not None:
                self._taken += chunk.size - chunk.filled
            self._shut_current()
            chunk = self._current = self._open(nbytes)
        chunk.filled += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return chunk

    def _open(self, nbytes: int) -> _Chunk:
        self.settle()
        if nbytes > self._sizes.chunk_bytes:
            chunk = _Chunk(-1, self._pager.allocate(nbytes, extra=True), nbytes)
        else:
            if not self._free:
                self._make()
            index = self._free.pop()
            chunk = _Chunk(index, self._regions[index], self._sizes.chunk_bytes)
        self._on_open(chunk.region)
        self._pager.acquire([chunk.region], pin=True)
        return chunk

    def _shut_current(self) -> None:
        if self._current is not None:
            chunk, self._current = self._current, None
            self._shut(chunk)

    def _shut(self, chunk: _Chunk) -> None:
        chunk.open = False
        self._pager.unpin([chunk.region])
        if not chunk.live:
            self._drop(chunk)

    def end_forward(self) -> None:
        """Close the current chunk; the next forward opens a new one."""
        self._shut_current()

    def ask(self, storage: int) -> int | None:
        """Return the region of a storage that backward unpacks, None if it is saved in place."""
        chunk = self._where.get(storage)
        if chunk is None:
            return None
        if chunk.region != self._last:
            self.settle()
            self._last = chunk.region
            self._pager.touch([chunk.region])
        return chunk.region

    def end(self, storage: int) -> None:
        """Mark a storage as no longer needed; `settle` frees it."""
        self._ended.append(storage)

    def settle(self) -> None:
        """Free the storages that have ended, and the closed chunks left empty."""
        ended, self._ended = self._ended, []
        for storage in ended:
            chunk = self._where.pop(storage, None)
            if chunk is None:
                self._kept -= self._nbytes.pop(storage, 0)
                continue
            chunk.live -= 1
            if not chunk.live and not chunk.open:
                self._drop(chunk)

    def _drop(self, chunk: _Chunk) -> None:
        if chunk.index < 0:
            self._pager.release(chunk.region)
        else:
            self._pager.discard(chunk.region)
            self._free.append(chunk.index)
            self._free.sort(reverse=True)
