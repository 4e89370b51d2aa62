"""Pinned host memory for regions that are not on the accelerator: runs of pages in a few pieces.

[Note: pieces]  A copy may not cross from one piece that was pinned into another. So a region lies
in one piece, and a region larger than a piece gets one of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.streams import Streams
from dynoffload.planning.extents import Extents
from dynoffload.units import MiB, format_bytes

_PIECE = 64 * MiB


class Slot(NamedTuple):
    """Bytes of the pool: the number of the piece, the first page there, and the pages."""

    piece: int
    page: int
    pages: int


class PinnedPool:
    """Pages of host memory.

    Args:
        streams: whose host memory it is.
        page_bytes: slots are multiples of it.
        begin: bytes of the first piece, which is taken at once.
        grows: take further pieces, as many as are asked for.
    """

    def __init__(self, streams: Streams, page_bytes: int, begin: int, *, grows: bool) -> None:
        self._streams, self._page, self._grows = streams, page_bytes, grows
        self._pieces: list[torch.Tensor] = []
        self._free: list[Extents] = []
        self._given: set[int] = set()  # pieces of which a slot was given away
        self.nbytes = 0
        if begin:
            self._add(begin)

    def take(self, nbytes: int) -> Slot | None:
        """Return a slot of ``nbytes``, a multiple of the page; None if there is no room.

        Raises:
            BudgetError: the host has no more memory to give.
        """
        pages = nbytes // self._page
        for piece, free in enumerate(self._free):
            page = free.take(pages)
            if page is not None:
                return Slot(piece, page, pages)
        if not self._grows:
            return None
        piece = self._add(max(nbytes, _PIECE))
        page = self._free[piece].take(pages)
        assert page is not None
        return Slot(piece, page, pages)

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        self._free[slot.piece].give(slot.page, slot.pages)

    def bytes_of(self, slot: Slot, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` of a slot, uint8."""
        begin = slot.page * self._page
        return self._pieces[slot.piece][begin : begin + nbytes]

    def give_away(self, slot: Slot, nbytes: int) -> torch.UntypedStorage:
        """Return the first ``nbytes`` of a slot as a storage that outlives the pool, which has that
        slot no more."""
        self._given.add(slot.piece)
        content = self.bytes_of(slot, nbytes).numpy().data
        return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()

    def close(self) -> None:
        """Give the memory back; no copy of it is under way."""
        while self._pieces:
            piece = self._pieces.pop()
            self._streams.release(piece, held=len(self._pieces) in self._given)
        self._free.clear()
        self.nbytes = 0

    def _add(self, nbytes: int) -> int:
        pages = -(-nbytes // self._page)
        try:
            with torch.inference_mode(False):  # it outlives whichever mode it is first asked for in
                piece = self._streams.host(pages * self._page)
        except MemoryError as error:
            raise BudgetError(
                f"the host has no {format_bytes(nbytes)} more beside the "
                f"{format_bytes(self.nbytes)} that hold what is not on the accelerator: pass "
                "host_budget= what it can spare, and the rest goes to a file"
            ) from error
        self._pieces.append(piece)
        free = Extents(pages)
        self._free.append(free)
        self.nbytes += pages * self._page
        return len(self._pieces) - 1
