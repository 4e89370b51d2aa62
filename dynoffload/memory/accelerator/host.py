"""The tiers below the accelerator: host memory, and a file if host memory has a budget.

All methods require the device's mutex. File transfers run in threads of their own, which take no
lock. The device queues copies from and to the accelerator; here they are only waited for.

[Note: pieces]  Host memory is allocated in a few pieces. A copy may not cross from one pinned piece
into another. So a region is within one piece, and a region larger than a piece gets its own.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import NoReturn

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.region import DeviceRegion, Slot
from dynoffload.memory.accelerator.rows import Rows
from dynoffload.memory.accelerator.streams import StreamEvent, Streams
from dynoffload.memory.region_allocator import called
from dynoffload.memory.spill import NoFile, SpillFile, transfer
from dynoffload.planning.extents import Extents
from dynoffload.units import MiB, format_bytes

_PIECE = 64 * MiB


class HostTier(Rows):
    """Host memory, and the file below it; `RegionPool` describes the arguments."""

    def __init__(
        self,
        streams: Streams,
        capacity: int,
        page_bytes: int,
        spill: SpillFile | NoFile,
        need: int,
        budget: int | None,
        threads: int,
    ) -> None:
        super().__init__(capacity, page_bytes, spill, 0)
        self.device, self._streams, self._host_budget = streams.device, streams, budget
        self._pieces: list[tuple[torch.Tensor, Extents]] = []  # with free extents
        self._given: set[int] = set()  # pieces with a slot that was given away
        pages = -(-need // page_bytes) if budget is None else budget // page_bytes
        if pages:
            self._add_piece(pages * page_bytes)
        self._draining: list[tuple[Slot, StreamEvent]] = []  # slots that copies still use
        self._workers: ThreadPoolExecutor | None = None
        if isinstance(spill, SpillFile):
            self._workers = ThreadPoolExecutor(threads, "dynoffload-file")

    def taken_bytes(self) -> int:
        """See `Device.taken_bytes`: this is host memory."""
        return sum(len(piece) for piece, _ in self._pieces)

    # Slots; see [Note: pieces]

    def _content(self, cell: DeviceRegion, nbytes: int = 0) -> torch.Tensor:
        """Return the bytes of a region's slot, uint8; ``nbytes`` of them if given."""
        assert cell.slot is not None
        begin = cell.slot.page * self.page_bytes
        return self._pieces[cell.slot.piece][0][begin : begin + (nbytes or cell.nbytes)]

    def _take_slot(self, nbytes: int) -> Slot | None:
        """Return a slot of whole pages; None if host memory is full and has a budget.

        Raises:
            BudgetError: the host has no memory left.
        """
        pages = nbytes // self.page_bytes
        for number, (_, free) in enumerate(self._pieces):
            if (page := free.take(pages)) is not None:
                return Slot(number, page, pages)
        if self._host_budget is not None:
            return None
        self._add_piece(max(nbytes, _PIECE))
        return self._take_slot(nbytes)

    def _give_slot(self, slot: Slot) -> None:
        self._pieces[slot.piece][1].give(slot.page, slot.pages)

    def _add_piece(self, nbytes: int) -> None:
        pages = -(-nbytes // self.page_bytes)
        try:
            with torch.inference_mode(False):  # it outlives the caller's mode
                piece = self._streams.host(pages * self.page_bytes)
        except MemoryError as error:
            raise BudgetError(
                f"the host has no {format_bytes(nbytes)} more beside the "
                f"{format_bytes(self.taken_bytes())} that hold what is not on the accelerator: "
                "pass host_budget= what it can spare, and the rest goes to a file"
            ) from error
        self._pieces.append((piece, Extents(pages)))

    def _place(self, cell: DeviceRegion, *, wait: bool) -> bool:
        """Give a region a slot, if it has none.

        Args:
            cell: the region.
            wait: until other regions are evicted; else use only what is free at once.

        Returns:
            Whether it has one; always True with ``wait``.

        Raises:
            BudgetError: no region can be evicted.
            SpillError: regions to be evicted cannot be written.
        """
        for one in self._finish_done():
            one.error = 0  # retry failed writes
        while cell.slot is None:
            self._drain()
            cell.slot = self._take_slot(cell.padded)
            if cell.slot is not None:
                return True
            victim = self._host_victim(cell, any_time=wait)
            if victim is not None:
                self._send_below(victim)
            elif not wait:
                return False
            elif not self._wait_for_any():
                raise BudgetError(
                    f"no {format_bytes(cell.padded)} of host memory came free for "
                    f"{called(self.names, cell.region, cell.nbytes)}: raise host_budget "
                    f"({format_bytes(self.taken_bytes())})"
                )
            if wait:
                self._check_file()
        return True

    def _give_away(self, cell: DeviceRegion) -> torch.UntypedStorage:
        """Return a slot's content as a storage that outlives this object; the region loses the
        slot. No copy from or to it may be under way."""
        assert cell.slot is not None
        content = self._content(cell).numpy().data
        self._given.add(cell.slot.piece)
        cell.slot, cell.in_host = None, False
        return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()

    def _leave_host(self, cell: DeviceRegion) -> None:
        """Release a region's slot, and discard its content there."""
        cell.finish()
        slot, cell.slot, cell.in_host = cell.slot, None, False
        if slot is not None and cell.copied is not None:
            self._draining.append((slot, cell.copied))
            cell.copied = None
        elif slot is not None:
            self._give_slot(slot)

    def _drain(self) -> None:
        draining, self._draining = self._draining, []
        for slot, copied in draining:
            if copied.reached():
                self._give_slot(slot)
            else:
                self._draining.append((slot, copied))

    def _host_victim(self, wanted: DeviceRegion, *, any_time: bool) -> DeviceRegion | None:
        """Return the region to evict from host memory for ``wanted``: clean ones first, then the
        farthest next use. Unless ``any_time``, a dirty one must be used later than ``wanted``."""
        found: DeviceRegion | None = None
        best = (False, -1 if any_time else self._plan.next_use(wanted.region), 0)
        for cell in self._cells.values():
            if cell.slot is None or cell is wanted or not cell.slot_is_idle() or cell.error:
                continue
            free = not cell.in_host or cell.in_file
            if not free and self._workers is None:
                continue
            rank = (free, self._plan.next_use(cell.region), -cell.stamp)
            if rank > best:
                found, best = cell, rank
        return found

    def _send_below(self, cell: DeviceRegion) -> None:
        """Evict a region from host memory: at once, or begin to write it to the file."""
        if not cell.in_host or cell.in_file:
            self._leave_host(cell)
        else:
            self._begin(cell, reads=False)

    def _wait_for_any(self) -> bool:
        """Wait until a slot may be free; return whether any transfer was under way."""
        under_way = [cell.io for cell in self._cells.values() if cell.io is not None]
        if under_way:
            wait_for(under_way, return_when=FIRST_COMPLETED)
            return True
        cells = sorted(self._cells.values(), key=lambda cell: cell.stamp)
        copies = [copied for _, copied in self._draining] + [cell.copied for cell in cells]
        oldest = next((copied for copied in copies if copied is not None), None)
        if oldest is not None:
            oldest.wait()
        return oldest is not None

    # The file

    def _read(self, cell: DeviceRegion, *, wait: bool) -> bool:
        """Read a region's bytes from the file into its slot.

        Args:
            cell: the region; its newest bytes are in the file.
            wait: until they are read; else begin to read them.

        Returns:
            Whether host memory has them; it may be False after a wait if the slot was lost.

        Raises:
            BudgetError: there is no room for them.
            SpillError: they cannot be read.
        """
        if cell.in_host:
            return True
        if cell.io is not None and (wait or cell.io.done()):
            cell.finish()
        elif cell.io is None:
            if not self._place(cell, wait=wait):
                return False
            cell.error = 0
            self._begin(cell, reads=True)
            if wait:
                cell.finish()
        if wait and cell.error:
            self._fail(cell)
        return cell.in_host

    def _begin(self, cell: DeviceRegion, *, reads: bool) -> None:
        """Begin to read a slot's bytes from the file, or to write them, with their padding."""
        assert self._workers is not None
        assert isinstance(self._spill, SpillFile)
        content = self._content(cell, cell.padded)
        cell.reads = reads
        fd = self._spill.fd
        cell.io = self._workers.submit(transfer, fd, content, cell.offset, reads=reads)

    def _check_file(self) -> None:
        """Raise the error of a file transfer that failed since the last call.

        Raises:
            SpillError: a region could not be read or written.
        """
        for cell in self._finish_done():
            self._fail(cell)

    def _finish_done(self) -> list[DeviceRegion]:
        """Finish completed file transfers; return the regions whose transfers failed."""
        if self._workers is None:
            return []
        for cell in self._cells.values():
            if cell.io is not None and cell.io.done():
                cell.finish()
        return [cell for cell in self._cells.values() if cell.error]

    def _fail(self, cell: DeviceRegion) -> NoReturn:
        assert isinstance(self._spill, SpillFile)
        number, cell.error = cell.error, 0
        what = called(self.names, cell.region, cell.nbytes)
        raise self._spill.failed(number, what, reads=cell.in_file)

    def _close_host(self) -> None:
        """Release the memory; no copy from or to it may be under way."""
        if self._workers is not None:
            self._workers.shutdown()
        self._draining.clear()
        while self._pieces:
            piece, _ = self._pieces.pop()
            self._streams.release(piece, held=len(self._pieces) in self._given)
        self._spill.close()
