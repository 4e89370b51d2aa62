"""The tiers below the accelerator: host memory, and a file if host memory has a budget.

All methods require the device's mutex. File transfers run in threads of their own, which take no
lock. The device queues copies from and to the accelerator; here they are only waited for.

[Note: pieces]  Host memory is allocated in a few pieces. A copy may not cross from one pinned piece
into another. So a region is within one piece, and a region larger than a piece gets its own.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import islice
from typing import NoReturn

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.region import DeviceRegion, Slot
from dynoffload.memory.accelerator.rows import Rows
from dynoffload.memory.accelerator.streams import StreamEvent, Streams
from dynoffload.memory.eviction_order import EvictionOrder
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
        self._host_order: EvictionOrder[DeviceRegion] = EvictionOrder(
            self._cells.values, self._may_be_sent_below, self._place_in_host_order
        )
        self._in_transfer: OrderedDict[DeviceRegion, None] = OrderedDict()  # in order of begin
        self._failed: dict[DeviceRegion, None] = {}  # those with an error
        self._threads = threads
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
            self._take_error(one)  # retry failed writes
        while cell.slot is None:
            self._drain()
            if self._workers is not None:
                self._host_order.add(cell)
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
        self._finish(cell)
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
        self._finish_done()
        later_than = -1 if any_time else self._plan.next_use(wanted.region)
        return self._host_order.first((True, -later_than), DeviceRegion.slot_is_idle)

    def _may_be_sent_below(self, cell: DeviceRegion) -> bool:
        """Return whether a region has a slot, and the file below may have its bytes instead."""
        has_slot = cell.slot is not None and self._workers is not None
        return has_slot and cell.io is None and not cell.error

    def _place_in_host_order(self, cell: DeviceRegion) -> tuple[bool, int, int]:
        dirty = cell.in_host and not cell.in_file
        return dirty, -self._plan.next_use(cell.region), cell.stamp

    def _used_later(self, cell: DeviceRegion) -> None:
        super()._used_later(cell)
        if self._may_be_sent_below(cell):
            self._host_order.add(cell)

    def _renew_orders(self) -> None:
        super()._renew_orders()
        self._host_order.renew()

    def _written(self, cell: DeviceRegion) -> None:
        """Mark the accelerator's bytes as the only newest ones; a slot's are clean."""
        had_others = cell.in_host
        cell.written()
        if had_others and self._may_be_sent_below(cell):
            self._host_order.add(cell)

    def _send_below(self, cell: DeviceRegion) -> None:
        """Evict a region from host memory: at once, or begin to write it to the file."""
        if not cell.in_host or cell.in_file:
            self._leave_host(cell)
        else:
            self._begin(cell, reads=False)

    def _wait_for_any(self) -> bool:
        """Wait until a slot may be free; return whether any transfer was under way."""
        under_way = [cell.io for cell in self._transferring() if cell.io is not None]
        if under_way:
            wait_for(under_way, return_when=FIRST_COMPLETED)
            return True
        copies = [copied for _, copied in self._draining]
        if not copies:
            cell = self._host_order.first((True, 1), lambda cell: cell.copied is not None)
            copies = [cell.copied] if cell is not None and cell.copied is not None else []
        if copies:
            copies[0].wait()
        return bool(copies)

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
            self._finish(cell)
        elif cell.io is None:
            if not self._place(cell, wait=wait):
                return False
            self._take_error(cell)
            self._begin(cell, reads=True)
            if wait:
                self._finish(cell)
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
        self._in_transfer[cell] = None
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
        while ended := [one for one in self._transferring() if one.io is None or one.io.done()]:
            for cell in ended:
                self._finish(cell)
        return list(self._failed)

    def _transferring(self) -> list[DeviceRegion]:
        """Return the regions whose file transfers have begun; threads take them in order."""
        return list(islice(self._in_transfer, self._threads))

    def _finish(self, cell: DeviceRegion) -> None:
        """Wait for a region's file transfer, if any."""
        if cell in self._in_transfer:
            cell.finish()
            if cell.error:
                self._failed[cell] = None
            self._host_order.add(cell)
            del self._in_transfer[cell]

    def _take_error(self, cell: DeviceRegion) -> int:
        """Return the errno of a region's failed transfer, which may be tried again."""
        self._host_order.add(cell)
        number, cell.error = cell.error, 0
        self._failed.pop(cell, None)
        return number

    def _fail(self, cell: DeviceRegion) -> NoReturn:
        assert isinstance(self._spill, SpillFile)
        number = self._take_error(cell)
        what = called(self.names, cell.region, cell.nbytes)
        raise self._spill.failed(number, what, reads=cell.in_file)

    def _close_host(self) -> None:
        """Release the memory; no copy from or to it may be under way."""
        if self._workers is not None:
            self._workers.shutdown()
        self._draining.clear()
        self._in_transfer.clear()
        self._failed.clear()
        while self._pieces:
            piece, _ = self._pieces.pop()
            self._streams.release(piece, held=len(self._pieces) in self._given)
        self._spill.close()
