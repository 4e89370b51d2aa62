"""The CPU device where userfaultfd is unavailable: regions are a shared mapping of the spill file.

The kernel serves an access to an absent region without notice. Results are exact as with the pager,
but this memory bypasses the budget. So the device keeps its own accounts: it fetches and evicts
regions explicitly, and counted bytes never exceed the capacity. It finds unannounced accesses in
the page cache later, and counts or evicts these regions. So announced accesses never exceed the
cap, which is soon restored after others.

[Note: one transfer]  Callers make their own transfers; one thread executes the plan and looks for
unannounced accesses. All hold the one mutex while bytes move, so there is one transfer at a time,
and a region is present or absent, never in between. An interrupted call leaves accounts that are
right or too high: pages of a region counted as absent are found as unannounced.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dynoffload.errors import BackendError, SpillError
from dynoffload.memory.device import Cause, Counters, EventKind
from dynoffload.memory.mapped_cache import MappedCache, MappedRegion
from dynoffload.memory.mapping import Mapping
from dynoffload.memory.region_allocator import arena_pages
from dynoffload.memory.spill import SpillFile
from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.schedule import Kind, Schedule, Use

_GRACE_S = 60.0  # how long to wait for an unpin
_INSPECT_S = 0.1  # how long an unannounced access may go unnoticed
_LET_IN_S = 1e-4  # between two planned transfers, so that callers get the mutex


class MappedFile(MappedCache):
    """A `Device` whose absent regions are read from the mapped file (Linux).

    Args:
        capacity: most bytes of regions in memory.
        page_bytes: power of two from the system's page to 2 MiB.
        spill_dir: directory of the spill file.
        need: minimum bytes of the spill file.
        debug: checksum regions as they are evicted, and compare as they are fetched.

    Raises:
        BackendError: the system refuses the mapping.
        SpillError: the spill directory cannot be used.
    """

    name = "mapped"
    guarded = False

    def __init__(
        self,
        capacity: int,
        page_bytes: int,
        spill_dir: Path,
        *,
        need: int = 0,
        debug: bool = False,
    ) -> None:
        system_page = os.sysconf("SC_PAGE_SIZE")
        if page_bytes % system_page:
            raise BackendError(
                f"page_bytes={page_bytes} is no multiple of this system's pages of {system_page} "
                f"bytes: pass page_bytes={system_page} or more"
            )
        spill = SpillFile(spill_dir, need, direct=False)
        try:
            spill.grow(page_bytes)
            mapping = Mapping(spill.fd, arena_pages(page_bytes) * page_bytes, page_bytes)
        except SpillError:
            spill.close()
            raise
        except OSError as error:
            spill.close()
            raise BackendError(
                f"the spill file in {spill_dir} cannot be mapped: {error.strerror}; raise the "
                "limit of virtual memory (ulimit -v), or pass spill_dir= another disk"
            ) from error
        whole = capacity // page_bytes * page_bytes
        super().__init__(whole, page_bytes, spill, mapping, debug)
        self._process = os.getpid()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dynoffload-mapped", daemon=True)
        self._thread.start()

    # Regions

    def clear(self, regions: Sequence[int]) -> None:
        """See `Device.clear`."""
        with self._mutex:
            for cell in self._all(regions):
                if self._is_clear(cell):
                    continue
                self._forget(cell)
                try:
                    if self._mapping.holds_data(cell.offset, cell.padded):
                        self._mapping.clear(cell.offset, cell.padded)
                except OSError as error:
                    raise self._failed(cell, error, reads=False) from error
                cell.cleared = True

    def is_clear(self, regions: Sequence[int]) -> list[bool]:
        """See `Device.is_clear`."""
        with self._mutex:
            return [self._is_clear(cell) for cell in self._all(regions)]

    def lock(self, regions: Sequence[int]) -> None:
        """Not supported, as no access waits here; callers check `guarded` first."""
        raise AssertionError("the mapped file cannot lock regions")

    unlock = lock

    # Residency

    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """See `Device.acquire`."""
        self._check_room(regions)
        self._bring(regions, pin=pin)

    def unpin(self, regions: Sequence[int]) -> None:
        """See `Device.unpin`."""
        with self._mutex:
            self._pin(self._all(regions), -1)

    def _bring(self, regions: Sequence[int], *, pin: bool, patient: bool = True) -> None:
        """Make regions present together; if not ``patient``, skip those that pins keep out."""
        start, kept = time.perf_counter(), False
        with self._mutex:
            wanted = self._all(regions)
            self._pin(wanted, 1)
            try:
                self._busy.clear()  # retry failed writes
                for cell in wanted:
                    self._use(cell)
                    stalls = not cell.present and (cell.content or self._free < cell.padded)
                    until = time.monotonic() + _GRACE_S
                    while not cell.present:
                        if self._room_for(cell, (self._plan.position, -1)):
                            self._fetch(cell, Cause.FAULT)
                        elif patient:
                            self._wait_for_unpin(cell, until)
                        else:
                            break
                    if stalls and cell.present:
                        self._tally.stalls += 1
                        self._tally.note(
                            EventKind.STALL, Cause.FAULT, cell.region, start, cell.nbytes
                        )
                        begun, start = start, time.perf_counter()
                        self._tally.stall_s += start - begun
                kept = pin
            finally:
                if not kept:
                    self._pin(wanted, -1)

    def _wait_for_unpin(self, cell: MappedRegion, until: float) -> None:
        """Wait up to a second for other callers to unpin regions.

        Raises:
            BudgetError: it is past ``until``.
            SpillError: a region that should be evicted cannot be written.
        """
        for error in self._busy.values():
            raise type(error)(*error.args)  # a new one: the kept one must not keep frames alive
        if not self._unpinned.wait(1.0) and time.monotonic() > until:
            pinned = [one.region for one in self._cells.values() if one.pins]
            raise self._no_room([cell.region], pinned, f" within {_GRACE_S:.0f} s")

    # The plan

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """See `Device.follow`."""
        with self._mutex:
            self._follow(PlanCursor(uses, schedule.actions))
            self._busy.clear()
            self._inspect()
            self._work.notify()

    def advance(self, position: int) -> None:
        """See `Device.advance`. The use's present regions count as used; accesses are not seen."""
        with self._mutex:
            self._advance(position)
            for region in self._plan.regions():
                cell = self._cells.get(region)
                if cell is not None and cell.present:
                    self._use(cell)
            self._work.notify()

    def reserve(self, nbytes: int) -> None:
        """See `Device.reserve`."""
        with self._mutex:
            super().reserve(nbytes)
            self._work.notify()

    def _run(self) -> None:
        """Execute the plan, in a thread of its own; see [Note: one transfer]."""
        while not self._closed:
            with self._mutex:
                try:
                    moved = self._serve_plan()
                    if time.monotonic() - self._inspected > _INSPECT_S:
                        self._inspect()
                    elif not moved and not self._closed:
                        self._work.wait(_INSPECT_S)
                except OSError as error:  # reported by `counters`
                    self._error = SpillError(error.errno or errno.EIO, str(error))
            time.sleep(_LET_IN_S)

    def _serve_plan(self) -> bool:
        """Make one transfer for the plan or the reserve; False if none is due."""
        plan = self._plan
        while (due := self._due()) is not None:
            kind, cell = due
            next_use = plan.next_use(cell.region)
            if kind is Kind.EVICT:
                plan.done()
                self._evict(cell, Cause.PLAN)
                return True
            if self._free >= cell.padded + self._reserve:
                plan.done()
                try:
                    self._fetch(cell, Cause.PLAN)
                except SpillError as error:
                    self._error = error
                return True
            if next_use > plan.position + 1 or (victim := self._victim(next_use)) is None:
                break  # there is time to wait for room, or no victim
            self._evict(victim, Cause.PLAN)
            return True
        if self._free < self._reserve and (victim := self._victim(plan.position)) is not None:
            self._evict(victim, Cause.ROOM)
            return True
        return False

    # What happened

    def resident(self) -> list[int]:
        """See `Device.resident`."""
        with self._mutex:
            return sorted(cell.region for cell in self._cells.values() if cell.present)

    def taken_bytes(self) -> int:
        """See `Device.taken_bytes`: evicted memory is returned at once."""
        return self._used

    def counters(self) -> Counters:
        """See `Device.counters`."""
        with self._mutex:
            self._inspect()
            if self._error is not None:
                error, self._error = self._error, None
                raise type(error)(*error.args)
            return super().counters()

    def close(self) -> None:
        """See `Device.close`."""
        if self._closed or os.getpid() != self._process:
            return
        # After `retire`, this thread may collect the last storage, but it cannot join itself.
        if threading.current_thread() is self._thread:
            threading.Thread(target=self.close, name="dynoffload-closing", daemon=True).start()
            return
        with self._mutex:
            self._closed = True
            self._work.notify()
        self._thread.join()
        self._storages.clear()
        self._rows.clear()
        self._mapping.close()
        self._spill.close()
