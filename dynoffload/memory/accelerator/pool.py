"""The memory pool of an accelerator's regions, and the copies that fetch and evict them.

[Note: streams]  The host runs ahead of the accelerator: allocations, copies and releases take
effect later. Queued work may still use released memory. Only later work of the compute stream gets
it, and order keeps that safe. A copy in begins after the event at which the compute stream was
given the memory; a copy out begins after the last work that uses it. The compute stream waits for a
copy in before it uses the memory, and for a copy out before the memory is reused.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.host import HostTier
from dynoffload.memory.accelerator.region import DeviceRegion, State
from dynoffload.memory.accelerator.rows import bytes_of, unseen
from dynoffload.memory.accelerator.streams import StreamEvent, Streams, TimedEvent
from dynoffload.memory.accelerator.workspace import WorkspaceEstimate
from dynoffload.memory.device import Cause, EventKind
from dynoffload.memory.region_allocator import called
from dynoffload.memory.spill import NoFile, SpillFile
from dynoffload.units import KiB, format_bytes

logger = logging.getLogger(__name__)

PAGE = 4 * KiB
UNKNOWN = -1
"""The use number of a region while more work on it may still be enqueued."""
_AHEAD = 4  # uses that the host may run ahead


class RegionPool(HostTier):
    """The pool of an accelerator: allocates, fetches and evicts its regions.

    Private methods require ``_mutex``.

    Args:
        streams: of the accelerator.
        capacity: bytes of its memory that regions may take.
        spill_dir: directory of the file, if there is one.
        page_bytes: regions are padded to this in every tier.
        budget: bytes of its memory for regions and all else, by its allocator's count; see
            [Note: workspace]. None: not enforced.
        least: minimum bytes of the pool, at most ``capacity``.
        need: minimum bytes of all regions.
        host_budget: bytes of host memory for regions not on the accelerator; the rest is in the
            file. None: host memory holds all, and there is no file.
        threads: number of threads that read and write the file.

    Raises:
        BudgetError: the host lacks the memory.
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
        self._uses: deque[tuple[int, StreamEvent]] = deque()  # each with an event at its begin
        self._now = 0  # the number of the current use
        self._leaving: OrderedDict[DeviceRegion, None] = OrderedDict()  # in order
        self._bare = self._bare_peak = 0  # used bytes without padding
        self._workspace = WorkspaceEstimate(self.capacity, least, budget)
        self._budget = self.capacity if budget is None else budget
        self._closed = self._said_full = False
        self._process = os.getpid()
        self._locked: set[int] = set()
        self._lent: OrderedDict[int, None] = OrderedDict()  # pinned regions, in order
        self._at_work: Sequence[int] = ()  # regions of the work that `at_once` enqueues
        self.on_locked: Callable[[int], None] = self._locked.discard
        self._resize(self._workspace.capacity)

    def _is_evictable(self, cell: DeviceRegion) -> bool:
        return cell.state is State.PRESENT and cell.storage.bring is not None

    def _may_leave(self, cell: DeviceRegion) -> bool:
        held = cell.pins or cell.region in self._at_work
        return cell.state is State.PRESENT and not held

    def _may_come(self, cell: DeviceRegion) -> bool:
        return cell.state is not State.PRESENT and cell.has_content

    def _use(self, cell: DeviceRegion) -> None:
        """Mark a region as used; the compute stream waits for its copy in."""
        super()._use(cell)
        if cell.ready is not None:
            late = not cell.ready.reached()
            wait = self._arrive(cell)
            if late:
                self._tally.stalls += 1
                self._tally.begun(wait.span, EventKind.STALL, Cause.FAULT, cell.region, cell.nbytes)

    # In

    def _enter(self, cell: DeviceRegion, cause: Cause, wanted: Sequence[DeviceRegion]) -> bool:
        """Allocate a region's memory, and queue the copy of its content.

        Args:
            cell: the region.
            cause: a planned fetch needs free room; others evict and wait.
            wanted: the regions needed together, for the error.

        Returns:
            Whether it was done.
        """
        must = cause is not Cause.PLAN
        while cell.state is State.ABSENT:  # making room may evict the host copy
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
            del self._leaving[cell]
            self._order.add(cell)
            cell.state, cell.gone, cell.here = State.PRESENT, None, True
        return True

    def _fill(self, cell: DeviceRegion, must: bool) -> bool:
        """Allocate a region's memory. Return False if there is none, or if evictions just freed
        some: they may have evicted the region's content from host memory.

        Raises:
            BudgetError: with ``must``, there is no memory left.
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
        self._order.add(cell)
        cell.state = State.PRESENT
        return True

    def _give_content(self, cell: DeviceRegion, cause: Cause) -> None:
        """Fill a region's new memory with its content."""
        try:
            if cell.zero:
                self._zero(cell)
                cell.zero = True
            elif cell.in_host or cell.in_file:
                self._copy_in(cell, cause)
        except BaseException:  # the memory does not hold the content
            self._empty(cell)
            raise

    @unseen
    def _zero(self, cell: DeviceRegion) -> None:
        bytes_of(cell.storage, 0, cell.nbytes).zero_()
        self._written(cell)

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
        """Make the compute stream wait for a region's copy in."""
        assert cell.ready is not None
        wait = self._streams.after(cell.ready)
        cell.ready = None
        return wait

    # Out

    def _make_room(self, need: int, must: bool, wanted: Sequence[DeviceRegion]) -> bool:
        """Free ``need`` bytes; unless ``must``, only by releasing copies out that have ended."""
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
            self._end(next(iter(self._leaving)))
        return True

    def _leave(self, cell: DeviceRegion, cause: Cause) -> bool:
        """Evict a region: at once, or once host memory has its bytes.

        Returns:
            Whether it left or is leaving; False if a plan's eviction finds no host memory yet.
        """
        if cell.ready is not None:  # not used yet
            self._arrive(cell)
        self._unused(cell)
        if not cell.is_dirty:
            self._empty(cell)
            return True
        if not self._place(cell, wait=cause is not Cause.PLAN):
            return False
        self._finish(cell)
        content = self._content(cell)
        copy = self._streams.copy_out(content, cell.storage, [self._after(cell.tick)])
        cell.gone = cell.copied = copy
        cell.state, cell.in_host = State.LEAVING, True
        self._leaving[cell] = None
        self._tally.bytes_out += cell.nbytes
        self._tally.begun(copy.span, EventKind.EVICT, cause, cell.region, cell.nbytes)
        return True

    def _end(self, cell: DeviceRegion) -> None:
        """Release the memory of a leaving region; the compute stream waits for its copy out."""
        assert cell.gone is not None
        self._streams.after(cell.gone)
        cell.gone = None
        del self._leaving[cell]
        self._empty(cell)

    def _reap(self) -> bool:
        """Release the memory of regions whose copies out have ended; return whether any have.
        Copies out end in the order in which they were queued."""
        before = len(self._leaving)
        while self._leaving:
            oldest = next(iter(self._leaving))
            if oldest.gone is None or not oldest.gone.reached():
                break
            self._end(oldest)
        return len(self._leaving) < before

    def _empty(self, cell: DeviceRegion) -> None:
        self._streams.empty(cell.storage)
        self._used -= cell.padded
        self._bare -= cell.nbytes
        cell.state, cell.here = State.ABSENT, False

    @unseen
    def _forget(self, cell: DeviceRegion) -> None:
        """Release a region's memory in all tiers, and discard its content."""
        self._unused(cell)
        if cell.ready is not None:
            self._arrive(cell)
        if cell.state is State.LEAVING:
            self._end(cell)
        elif cell.state is State.PRESENT:
            self._empty(cell)
        self._leave_host(cell)
        cell.forget()

    # Run-ahead limit; see [Note: ahead] in `accelerator`

    def _begin_use(self) -> StreamEvent | None:
        """Begin a use, with all work of earlier ones enqueued. Return the event that the host must
        wait for, so that it is not too far ahead."""
        self._now += 1
        self._uses.append((self._now, self._streams.now()))
        return self._uses.popleft()[1] if len(self._uses) > _AHEAD else None

    def _after(self, use: int) -> StreamEvent:
        """Return an event after all work of ``use``."""
        later = (event for number, event in self._uses if number > use != UNKNOWN)
        return next(later, None) or self._streams.now()

    # The pool's size

    @unseen
    def allocated_bytes(self) -> int:
        """See `Device.allocated_bytes`; also resizes the pool by [Note: workspace]."""
        with self._mutex:
            peak = self._streams.peak_bytes()
            self._streams.trim(self._budget)
            self._resize(self._workspace.after(peak, self._bare_peak))
            self._forget_peak()  # regions that have just made way are not of the next step
            return peak

    def count_anew(self) -> None:
        """Size the pool by what else is allocated now, and begin a new peak; called once setup is
        done."""
        with self._mutex:
            held = self._streams.given_bytes() - self._bare
            capacity = self._workspace.begin(held)  # regions beyond it leave when others need room
            self.capacity = capacity // self.page_bytes * self.page_bytes
            self._forget_peak()

    def _forget_peak(self) -> None:
        self._streams.peak_bytes()
        self._bare_peak = self._bare

    @unseen
    def make_way(self) -> bool:
        """After an operator ran out of memory: evict all unpinned regions, and shrink the pool by a
        quarter until its size is measured again. Return whether any memory was freed."""
        with self._mutex:
            before = self._used
            while self._used and self._send_out():
                pass
            freed = before - self._used
            self._resize(self._workspace.shrunk())
            if freed and not self._said_full:
                self._said_full = True
                logger.warning(
                    "%s had no memory left beside %s of regions, of which %s made way: lower the "
                    "budget of %s, or end what else uses it",
                    self._streams.name,
                    format_bytes(before),
                    format_bytes(freed),
                    format_bytes(self._budget),
                )
            return freed > 0

    def _resize(self, capacity: int) -> None:
        """Set the pool's capacity, and evict regions beyond it as far as possible."""
        self.capacity = capacity // self.page_bytes * self.page_bytes
        while self._used > self.capacity and self._send_out():
            pass

    def _send_out(self) -> bool:
        """Release the memory of a leaving region, or evict the one with the farthest next use;
        return whether there was one."""
        if self._leaving:
            self._end(next(iter(self._leaving)))
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
        self._finish(cell)
