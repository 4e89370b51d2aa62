"""The pool of an accelerator's regions, and the copies by which regions come and go.

[Note: streams]  The host runs ahead of the accelerator: what it gives memory, copies and takes back
is done later. So memory that is taken back may be under work that was given before; it goes to
later work of the compute stream alone, which comes after that by itself. A copy on another stream
begins after the event at which the compute stream was given the memory (in), or the last work that
uses it (out). The compute stream goes on after the copy before it uses the memory (in) or before
the memory goes to others (out).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.host import HostTier
from dynoffload.memory.accelerator.region import DeviceRegion, State
from dynoffload.memory.accelerator.rows import bytes_of, unseen
from dynoffload.memory.accelerator.streams import StreamEvent, Streams, TimedEvent
from dynoffload.memory.accelerator.workspace import WorkspaceEstimate
from dynoffload.memory.device import Cause, EventKind, called
from dynoffload.memory.spill import NoFile, SpillFile
from dynoffload.units import KiB, format_bytes

logger = logging.getLogger(__name__)

PAGE = 4 * KiB
UNKNOWN = -1
"""The number of a use that nobody knows: work may still be given."""
_AHEAD = 4  # uses


class RegionPool(HostTier):
    """The ground of an accelerator: the pool, and the ways in and out of it.

    All of it but what `Device` names is called with ``_mutex`` held.

    Args:
        streams: of the accelerator.
        capacity: bytes of its memory that regions may take.
        spill_dir: where the file lies, if there is one.
        page_bytes: regions are padded to this in every tier.
        budget: bytes of its memory that regions and all else may take by its own allocator's
            count, see [Note: workspace]; None: no heed is paid to that.
        least: bytes of ``capacity`` without which nothing works.
        need: bytes that regions will take at least.
        host_budget: bytes of host memory for what is not on the accelerator; the rest is in the
            file. None: host memory holds all, and there is no file.
        threads: that read and write the file.

    Raises:
        BudgetError: the host has no such memory.
        SpillError: the spill directory cannot be used.
    """

    def __init__(
        self,
        streams: Streams,
        capacity: int,
        spill_dir: Path,
        *,
        page_bytes: int = PAGE,
        budget: int | None = None,
        least: int = 0,
        need: int = 0,
        host_budget: int | None = None,
        threads: int = 4,
    ) -> None:
        spill: SpillFile | NoFile = NoFile(spill_dir)
        if host_budget is not None:
            spill = SpillFile(spill_dir, need)
        whole = capacity // page_bytes * page_bytes
        try:
            super().__init__(streams, whole, page_bytes, spill, need, host_budget, threads)
        except BaseException:
            spill.close()
            raise
        self.name = f"accelerator {streams.name}"
        self._uses: deque[tuple[int, StreamEvent]] = deque()  # an event after each of the last
        self._now = 0  # the number of the use that is under way
        self._leaving: list[DeviceRegion] = []  # in order
        self._bare = self._bare_peak = 0  # the same without padding, as the allocator gives it
        self._workspace = WorkspaceEstimate(self.capacity, least, budget)
        self._budget = self.capacity if budget is None else budget
        self._closed = self._said_full = False
        self._process = os.getpid()
        self._locked: set[int] = set()
        self.on_locked: Callable[[int], None] = self._locked.discard
        self._resize(self._workspace.capacity)

    def _may_leave(self, cell: DeviceRegion) -> bool:
        return cell.state is State.PRESENT and not cell.pins

    def _may_come(self, cell: DeviceRegion) -> bool:
        return cell.state is not State.PRESENT and cell.has_content

    def _use(self, cell: DeviceRegion) -> None:
        """Let the compute stream go on once a region that has entered is there."""
        super()._use(cell)
        if cell.ready is not None:
            late = not cell.ready.reached()
            wait = self._arrive(cell)
            if late:
                self._tally.stalls += 1
                self._tally.begun(wait.span, EventKind.STALL, Cause.FAULT, cell.region, cell.nbytes)

    # In

    def _enter(self, cell: DeviceRegion, cause: Cause, wanted: Sequence[DeviceRegion]) -> bool:
        """Give a region memory, and queue the copy of what it holds.

        Args:
            cell: the region.
            cause: by plan, if there is room; else whatever it takes.
            wanted: what is to be there together, for the error.

        Returns:
            Whether it was done.
        """
        must = cause is not Cause.PLAN
        while cell.state is State.ABSENT:  # each may undo another
            if self._free < cell.padded:
                if not self._make_room(cell.padded, must, wanted):
                    return False
            elif cell.in_file and not cell.in_host:
                if not self._read(cell, wait=must) and not must:
                    return False
            elif self._fill(cell, must):
                self._give_content(cell, cause)
                return True
            elif not must:
                return False
        if cell.state is State.LEAVING:
            assert cell.gone is not None
            self._streams.after(cell.gone)  # before anything may write it
            self._leaving.remove(cell)
            cell.state, cell.gone, cell.here = State.PRESENT, None, True
        return True

    def _fill(self, cell: DeviceRegion, must: bool) -> bool:
        """Give a region memory; return whether there was any, or others have made way and may have
        taken what the region is to hold from where it was.

        Raises:
            BudgetError: it must have some, and there is none.
        """
        try:
            self._streams.fill(cell.storage, cell.nbytes)
        except torch.OutOfMemoryError as error:
            if not must or self.make_way():
                return False
            raise BudgetError(
                f"{self._streams.name} has no {format_bytes(cell.nbytes)} left for "
                f"{called(self.names, cell.region, cell.nbytes)}, beside "
                f"{format_bytes(self._used)} of regions: lower the budget, so that operators find "
                "room beside it"
            ) from error
        self._used += cell.padded
        self._peak = max(self._peak, self._used)
        self._bare += cell.nbytes
        self._bare_peak = max(self._bare_peak, self._bare)
        cell.state = State.PRESENT
        return True

    def _give_content(self, cell: DeviceRegion, cause: Cause) -> None:
        """Have memory that was given to a region hold what is the region's."""
        try:
            if cell.zero:
                self._zero(cell)
                cell.zero = True
            elif cell.in_host or cell.in_file:
                self._copy_in(cell, cause)
        except BaseException:  # nobody may take what lies there for the region's
            self._empty(cell)
            raise

    @unseen
    def _zero(self, cell: DeviceRegion) -> None:
        bytes_of(cell.storage, 0, cell.nbytes).zero_()
        cell.written()

    def _copy_in(self, cell: DeviceRegion, cause: Cause) -> None:
        content, now = self._content(cell), self._streams.now()
        cell.ready = cell.copied = copy = self._streams.copy_in(cell.storage, content, [now])
        cell.here = True
        self._tally.bytes_in += cell.nbytes
        self._tally.begun(copy.span, EventKind.FETCH, cause, cell.region, cell.nbytes)
        if cause is Cause.PLAN:
            cell.prefetched = True
            self._tally.prefetched_bytes += cell.nbytes
        else:
            self._tally.faults += 1

    def _arrive(self, cell: DeviceRegion) -> TimedEvent:
        """Let the compute stream go on once a region's bytes are there."""
        assert cell.ready is not None
        wait = self._streams.after(cell.ready)
        cell.ready = None
        return wait

    # Out

    def _make_room(self, need: int, must: bool, wanted: Sequence[DeviceRegion]) -> bool:
        """Have ``need`` bytes free; by a plan, only those that are free by now."""
        while self._free < need:
            if self._reap() or not must:
                if not must and self._free < need:
                    return False
                continue
            leaving = sum(cell.padded for cell in self._leaving)
            if self._free + leaving < need:
                victim = self._victim(self._plan.position) or self._victim(-1)
                if victim is not None:
                    self._leave(victim, Cause.ROOM)
                    continue
            if not self._leaving:
                pinned = [c.region for c in self._cells.values() if c.pins]
                raise self._no_room([c.region for c in wanted], pinned)
            self._end(self._leaving[0])
        return True

    def _leave(self, cell: DeviceRegion, cause: Cause) -> bool:
        """Send a region out: at once, or once host memory has its bytes.

        Returns:
            Whether it left, or is on its way; by a plan it may have to wait for host memory.
        """
        if cell.ready is not None:  # nobody has used it
            self._arrive(cell)
        self._unused(cell)
        if not cell.is_dirty:
            self._empty(cell)
            return True
        if not self._place(cell, wait=cause is not Cause.PLAN):
            return False
        cell.finish()
        content = self._content(cell)
        copy = self._streams.copy_out(content, cell.storage, [self._after(cell.tick)])
        cell.gone = cell.copied = copy
        cell.state, cell.in_host = State.LEAVING, True
        self._leaving.append(cell)
        self._tally.bytes_out += cell.nbytes
        self._tally.begun(copy.span, EventKind.EVICT, cause, cell.region, cell.nbytes)
        return True

    def _end(self, cell: DeviceRegion) -> None:
        """Take the memory of a region that is leaving; the compute stream waits for its copy."""
        assert cell.gone is not None
        self._streams.after(cell.gone)
        cell.gone = None
        self._leaving.remove(cell)
        self._empty(cell)

    def _reap(self) -> bool:
        """Take the memory of what has left by now; return whether anything has."""
        gone = [one for one in self._leaving if one.gone is not None and one.gone.reached()]
        for cell in gone:
            self._end(cell)
        return bool(gone)

    def _empty(self, cell: DeviceRegion) -> None:
        self._streams.empty(cell.storage)
        self._used -= cell.padded
        self._bare -= cell.nbytes
        cell.state, cell.here = State.ABSENT, False

    @unseen
    def _forget(self, cell: DeviceRegion) -> None:
        """Let go of a region's memory everywhere, and of what it held."""
        self._unused(cell)
        if cell.ready is not None:
            self._arrive(cell)
        if cell.state is State.LEAVING:
            self._end(cell)
        elif cell.state is State.PRESENT:
            self._empty(cell)
        self._leave_host(cell)
        cell.forget()

    # How far the host is ahead; see [Note: ahead] in `accelerator`

    def _begin_use(self) -> StreamEvent | None:
        """A use begins, and all work of those before was given; return what to wait for, so that
        the host is not too far ahead."""
        self._now += 1
        self._uses.append((self._now, self._streams.now()))
        return self._uses.popleft()[1] if len(self._uses) > _AHEAD else None

    def _after(self, use: int) -> StreamEvent:
        """Return an event after all work of ``use``."""
        later = (event for number, event in self._uses if number > use != UNKNOWN)
        return next(later, None) or self._streams.now()

    # The pool, and the end

    @unseen
    def allocated_bytes(self) -> int:
        """See `Device.allocated_bytes`; the pool follows, by [Note: workspace]."""
        with self._mutex:
            peak = self._streams.peak_bytes()
            self._streams.trim(self._budget)
            regions, self._bare_peak = self._bare_peak, self._bare
            self._resize(self._workspace.after(peak, regions))
            return peak

    def count_anew(self) -> None:
        """Have `allocated_bytes` count from now on: what was taken so far was for no step."""
        with self._mutex:
            self._streams.peak_bytes()
            self._bare_peak = self._bare

    @unseen
    def make_way(self) -> bool:
        """An operator has found no memory: all regions that are not used make way, and the pool is
        a quarter smaller, until its size is measured again; return whether any could."""
        with self._mutex:
            before = self.capacity, self._used
            while self._used and self._send_out():
                pass
            freed = before[1] - self._used
            self._resize(self._workspace.shrunk())
            if freed and not self._said_full:
                self._said_full = True
                logger.warning(
                    "%s had no memory left for an operator, beside %s of regions, of which %s made "
                    "way: lower the budget of %s, or end what else uses it",
                    self._streams.name,
                    format_bytes(before[1]),
                    format_bytes(freed),
                    format_bytes(before[0]),
                )
            return freed > 0

    def _resize(self, capacity: int) -> None:
        """Let regions take no more than ``capacity`` bytes, or as little as they can now."""
        self.capacity = capacity // self.page_bytes * self.page_bytes
        while self._used > self.capacity and self._send_out():
            pass

    def _send_out(self) -> bool:
        """Take the memory of what is leaving, or is used last, at once; return whether there was
        any."""
        if self._leaving:
            self._end(self._leaving[0])
            return True
        victim = self._victim(-1)
        if victim is not None:
            self._leave(victim, Cause.ROOM)
            if victim.state is State.LEAVING:
                self._end(victim)
        return victim is not None

    def _settle(self, cell: DeviceRegion) -> None:
        for event in (cell.ready, cell.gone, cell.copied):
            if event is not None:
                event.wait()
        cell.finish()
