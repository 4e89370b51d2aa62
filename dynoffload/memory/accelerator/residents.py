"""Regions that come to an accelerator's memory and leave it, in the order of its queues.

What it is: who has memory there, and the copies by which regions enter and leave. What it is not:
who uses them, what is planned, and how large the pool is (`accelerator`).

[Note: moments]  The host runs ahead of the accelerator: what it gives memory, copies and takes back
is done later. So memory that is taken back may be under work that was given before; it goes to
later work of the compute queue alone, which comes after that by itself. A copy on another queue
begins after the moment at which the compute queue has been given the memory (in), or has been given
the last work that uses it (out), and the compute queue goes on after the copy before it uses the
memory (in) or before that goes to others (out).
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Sequence

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.cells import Cell, State
from dynoffload.memory.accelerator.host import Host
from dynoffload.memory.accelerator.lead import Lead
from dynoffload.memory.accelerator.queues import Lag, Queues
from dynoffload.memory.accelerator.rows import Rows, unseen
from dynoffload.memory.accelerator.telling import Telling
from dynoffload.memory.device import Cause, EventKind, called
from dynoffload.memory.following import Following
from dynoffload.memory.spill import NoFile, SpillFile
from dynoffload.memory.tally import Tally
from dynoffload.units import format_bytes


class Residents(Rows):
    """The ground of an accelerator: the pool, and the ways in and out of it.

    All of it is called with ``_mutex`` held.

    Args:
        queues: of the accelerator.
        capacity: bytes of its memory that regions may take.
        page_bytes: regions are padded to this in every tier.
        spill: the file below host memory, or what stands for none; closed if this fails.
        host_budget: bytes of host memory; None: as many as regions take.
        need: bytes that regions will take at least.
        threads: that read and write the file.
        record: keep events.

    Raises:
        BudgetError: the host has no such memory.
    """

    def __init__(
        self,
        queues: Queues,
        capacity: int,
        page_bytes: int,
        spill: SpillFile | NoFile,
        host_budget: int | None,
        need: int,
        threads: int,
        record: bool,
    ) -> None:
        super().__init__(capacity, page_bytes, spill, 0)
        self.name, self.device = f"accelerator {queues.name}", queues.device
        self._queues = queues
        self._mutex = threading.RLock()
        self._cells: dict[int, Cell] = {}
        self._plan = Following()
        try:
            self._host = Host(
                queues,
                page_bytes,
                need,
                host_budget,
                spill,
                self._cells,
                self._mutex,
                lambda region: self._plan.next_use(region),
                self.names,
                threads,
            )
        except BaseException:
            spill.close()
            raise
        self._tally = Tally(record)
        self._telling, self._lead = Telling(self._tally), Lead(queues)
        self._leaving: list[Cell] = []  # in order
        self._clock = 0
        self._used = self._peak = 0
        self._bare = self._bare_peak = 0  # the same without padding, as the allocator gives it

    @abstractmethod
    def make_way(self) -> bool:
        """The accelerator has no memory left: have regions leave; return whether any could."""

    def _use(self, cell: Cell) -> None:
        """Let the compute queue go on once a region that has entered is there."""
        self._clock += 1
        cell.stamp = self._clock
        if cell.prefetched:
            cell.prefetched = False
            self._tally.used_bytes += cell.nbytes
        if cell.ready is not None:
            ready, start = cell.ready, time.perf_counter()
            late = not ready.reached()
            lag = self._arrive(cell)
            if late:
                self._telling.waits(lag, cell, start)

    # In

    def _enter(self, cell: Cell, cause: Cause, wanted: Sequence[Cell]) -> bool:
        """Give a region memory, and queue the copy of what it holds.

        Args:
            cell: the region.
            cause: by plan, if there is room; else whatever it takes.
            wanted: what is to be there together, for the error.

        Returns:
            Whether it was done.
        """
        must = cause is not Cause.PLAN
        while cell.state is State.ABSENT:  # each may let go of the lock, and undo the other
            if self.capacity - self._used < cell.padded:
                if not self._make_room(cell.padded, must, wanted):
                    return False
            elif cell.in_file and not cell.in_host:
                if not self._host.fetch(cell, wait=must) and not must:
                    return False
            elif self._fill(cell, must):
                self._give_content(cell, cause)
                return True
            elif not must:
                return False
        if cell.state is State.LEAVING:
            assert cell.gone is not None
            self._queues.after(cell.gone)  # before anything may write it
            self._leaving.remove(cell)
            cell.state, cell.gone, cell.here = State.PRESENT, None, True
        return True

    def _fill(self, cell: Cell, must: bool) -> bool:
        """Give a region memory; return whether there was any, or others have made way and may have
        taken what the region is to hold from where it was.

        Raises:
            BudgetError: it must have some, and there is none.
        """
        try:
            self._queues.fill(cell.storage, cell.nbytes)
        except torch.OutOfMemoryError as error:
            if not must or self.make_way():
                return False
            raise BudgetError(
                f"{self._queues.name} has no {format_bytes(cell.nbytes)} left for "
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

    def _give_content(self, cell: Cell, cause: Cause) -> None:
        """Have memory that was given to a region hold what is the region's."""
        try:
            if cell.zero:
                self._zero(cell)
                cell.zero = True
            elif cell.in_host or cell.in_file:
                self._copy_in(cell, cause)
        except BaseException:  # nobody may take what lies there for the region's
            self._free(cell)
            raise

    @unseen
    def _zero(self, cell: Cell) -> None:
        _bytes_of(cell.storage).zero_()
        cell.written()

    def _copy_in(self, cell: Cell, cause: Cause) -> None:
        now = self._queues.now()
        content = self._host.content(cell)
        cell.ready = moment = cell.copied = self._queues.copy_in(cell.storage, content, [now])
        cell.here = True
        self._tally.bytes_in += cell.nbytes
        self._telling.copied(moment, EventKind.FETCH, cause, cell)
        if cause is Cause.PLAN:
            cell.prefetched = True
            self._tally.prefetched_bytes += cell.nbytes
        else:
            self._tally.faults += 1

    def _arrive(self, cell: Cell) -> Lag:
        """Let the compute queue go on once a region's bytes are there."""
        assert cell.ready is not None
        lag = self._queues.after(cell.ready)
        cell.ready = None
        return lag

    # Out

    def _make_room(self, need: int, must: bool, wanted: Sequence[Cell]) -> bool:
        """Have ``need`` bytes free; by a plan, only those that are free by now."""
        while self.capacity - self._used < need:
            if self._reap() or not must:
                if not must and self.capacity - self._used < need:
                    return False
                continue
            victim = self._victim(self._plan.position) or self._victim(-1)
            if victim is not None:
                self._leave(victim, Cause.ROOM)
                continue
            if not self._leaving:
                pinned = [c.region for c in self._cells.values() if c.pins]
                raise self._no_room([c.region for c in wanted], pinned)
            self._end(self._leaving[0])
        return True

    def _victim(self, later_than: int) -> Cell | None:
        """Return the region used latest among those used after ``later_than``; among equals what
        was used longest ago."""
        found, best = None, (later_than, 0)
        for cell in self._cells.values():
            if cell.state is State.PRESENT and not cell.pins:
                next_use = self._plan.next_use(cell.region)
                if next_use > later_than and (found is None or (next_use, -cell.stamp) > best):
                    found, best = cell, (next_use, -cell.stamp)
        return found

    def _leave(self, cell: Cell, cause: Cause) -> bool:
        """Send a region out: at once, or once host memory has its bytes.

        Returns:
            Whether it left, or is on its way; by a plan it may have to wait for host memory.
        """
        if cell.ready is not None:  # nobody has used it
            self._arrive(cell)
        if cell.prefetched:
            cell.prefetched = False
            self._tally.wasted_bytes += cell.nbytes
        if not cell.is_dirty:
            self._free(cell)
            return True
        while True:  # to wait lets go of the lock: others may take its slot from it meanwhile
            if not self._host.place(cell, wait=cause is not Cause.PLAN):
                return False
            self._host.settle(cell)
            if cell.slot is not None:
                break
        if cell.pins or cell.state is not State.PRESENT or not cell.is_dirty:
            return True  # things have moved on while host memory was waited for
        content = self._host.content(cell)
        moment = self._queues.copy_out(content, cell.storage, [self._lead.after(cell.tick)])
        cell.gone = cell.copied = moment
        cell.state, cell.in_host = State.LEAVING, True
        self._leaving.append(cell)
        self._tally.bytes_out += cell.nbytes
        self._telling.copied(moment, EventKind.EVICT, cause, cell)
        return True

    def _end(self, cell: Cell) -> None:
        """Take the memory of a region that is leaving; the compute queue waits for its copy."""
        assert cell.gone is not None
        self._queues.after(cell.gone)
        cell.gone = None
        self._leaving.remove(cell)
        self._free(cell)

    def _reap(self) -> bool:
        """Take the memory of what has left by now; return whether anything has."""
        gone = [one for one in self._leaving if one.gone is not None and one.gone.reached()]
        for cell in gone:
            self._end(cell)
        return bool(gone)

    def _free(self, cell: Cell) -> None:
        self._queues.empty(cell.storage)
        self._used -= cell.padded
        self._bare -= cell.nbytes
        cell.state, cell.here = State.ABSENT, False

    @unseen
    def _forget(self, cell: Cell) -> None:
        """Let go of a region's memory everywhere, and of what it held."""
        if cell.prefetched:
            self._tally.wasted_bytes += cell.nbytes
        if cell.ready is not None:
            self._arrive(cell)
        if cell.state is State.LEAVING:
            self._end(cell)
        elif cell.state is State.PRESENT:
            self._free(cell)
        self._host.leave(cell)
        cell.forget()

    # The pool, and the end

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

    def _settle(self, cell: Cell) -> None:
        for moment in (cell.ready, cell.gone, cell.copied):
            if moment is not None:
                moment.wait()
        self._host.settle(cell)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
