"""The CPU's device where userfaultfd is refused: regions are a shared mapping of the spill file.

An access to an absent region is served by the kernel, unasked and unseen, so results are exact as
with the pager; but the kernel gives memory without asking the budget. So the device keeps books of
its own: it brings regions in and out by explicit requests and never lets what it has counted pass
the capacity. What was touched without notice is found later, by looking at the page cache, and then
counted or sent out. So the cap holds for all that is announced and is restored soon for the rest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dynoffload.errors import BackendError, SpillError
from dynoffload.memory.debug import Checksums
from dynoffload.memory.device import Counters, Event
from dynoffload.memory.mapped_cache import CachedRegion, State
from dynoffload.memory.mapping import Mapping
from dynoffload.memory.region_allocator import arena_pages
from dynoffload.memory.spill import UNREAD, UNWRITTEN, SpillFile
from dynoffload.memory.spill import failure as spill_failure
from dynoffload.memory.transfer_queue import TransferQueue
from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.schedule import Schedule, Use

_GRACE_S = 60.0  # how long to wait for somebody to unpin


class MappedFile(TransferQueue):
    """A `Device` whose absent memory is the file itself (Linux).

    Args:
        capacity: bytes that regions in memory may reach.
        page_bytes: power of two from the system's page to 2 MiB.
        spill_dir: where the spill file lies.
        need: bytes that the spill file will take at least.
        threads: transfer threads.
        debug: checksum what leaves and compare it as it comes back.

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
        threads: int = 4,
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
        sums = Checksums(spill.fd) if debug else None
        super().__init__(capacity // page_bytes, page_bytes, spill, mapping, threads, sums)
        self._process = os.getpid()
        self._closed = False

    # Regions

    def _dismiss(self, region: int) -> None:
        with self._mutex:
            self._forget(self._cached[region])
            del self._cached[region]

    def discard(self, region: int) -> None:
        """See `Device.discard`."""
        with self._mutex:
            self._forget(self._cached[region])

    def clear(self, regions: Sequence[int]) -> None:
        """See `Device.clear`.

        Raises:
            SpillError: zeros cannot be written where the file system keeps none unwritten.
        """
        with self._mutex:
            for h in self._all(regions):
                self._clear(h)

    def is_clear(self, regions: Sequence[int]) -> list[bool]:
        """See `Device.is_clear`."""
        with self._mutex:
            return [self._is_clear(h) for h in self._all(regions)]

    def lock(self, regions: Sequence[int]) -> None:
        """No access waits here: a caller asks whether a device is `guarded` first."""
        raise AssertionError("the mapped file cannot lock regions")

    unlock = lock

    # Residency

    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """See `Device.acquire`.

        Raises:
            BudgetError: the regions do not fit the pool together, or the rest stays pinned.
            SpillError: the spill file cannot be read.
        """
        self._check_room(regions)
        with self._mutex:
            self._bring(self._all(regions), pin=pin, patient=True)

    def touch(self, regions: Sequence[int]) -> None:
        """Bring the regions in, as many as there is room for, since no access tells of itself.

        Raises:
            SpillError: the spill file cannot be read.
        """
        with self._mutex:
            room = self._pages - sum(h.pages for h in self._cached.values() if h.pins)
            wanted = []
            for h in self._all(dict.fromkeys(regions)):
                need = 0 if h.pins else h.pages
                if need <= room:
                    room -= need
                    wanted.append(h)
            self._bring(wanted, pin=False, patient=False)

    def unpin(self, regions: Sequence[int]) -> None:
        """See `Device.unpin`."""
        with self._mutex:
            self._pin(self._all(regions), -1)

    def _bring(self, wanted: Sequence[CachedRegion], *, pin: bool, patient: bool) -> None:
        """Wait until regions are present, lending a hand; the impatient leave what all others'
        pins keep out."""
        self._pin(wanted, 1)
        kept = False
        try:
            self._wait_for(wanted, patient=patient)
            kept = pin
        except BaseException:
            self._give_up(wanted)
            raise
        finally:
            if not kept:
                self._pin(wanted, -1)

    def _wait_for(self, wanted: Sequence[CachedRegion], *, patient: bool) -> None:
        self._hope()
        for h in wanted:
            self._use(h)
            h.error = 0
        until = time.monotonic() + _GRACE_S
        while absent := [h for h in wanted if h.state is not State.PRESENT]:
            for h in absent:
                if h.error:
                    failure, h.error = h.error, 0
                    told = self._unreadable(h, failure)
                    raise spill_failure(failure, f"{told}; {UNREAD}")
                self._want(h)
            if self._serve_urgent():
                until = time.monotonic() + _GRACE_S
                continue
            if not patient and not any(h.state.moving for h in self._cached.values()):
                self._give_up(wanted)
                return
            if (refused := self._refused()) is not None:
                number, told = refused
                raise spill_failure(number, f"{told}; {UNWRITTEN}")
            if not self._done.wait(1.0) and time.monotonic() > until:
                pinned = [h.region for h in self._cached.values() if h.pins]
                waited = f" within {_GRACE_S:.0f} s"
                raise self._no_room([h.region for h in absent], pinned, waited)

    # The plan

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """See `Device.follow`."""
        plan = PlanCursor(uses, schedule.actions)
        with self._mutex:
            self._plan = plan
            for h in self._cached.values():
                h.busy = False  # what could not be written then may be written now
            self._inspect()
            self._work.notify_all()

    def advance(self, position: int) -> None:
        """See `Device.advance`. What the use names counts as used: its accesses are not seen."""
        with self._mutex:
            self._plan.advance(position)
            for region in self._plan.regions():
                h = self._cached.get(region)
                if h is not None and h.state is State.PRESENT:
                    self._use(h)
            self._work.notify_all()

    def reserve(self, nbytes: int) -> None:
        """See `Device.reserve`."""
        with self._mutex:
            self._reserve = -(-nbytes // self.page_bytes)
            self._work.notify_all()

    # What happened

    def resident(self) -> list[int]:
        """See `Device.resident`."""
        with self._mutex:
            cached = self._cached.values()
            return sorted(h.region for h in cached if h.state is not State.ABSENT)

    def resident_bytes(self) -> int:
        """See `Device.resident_bytes`."""
        return self._used * self.page_bytes

    def taken_bytes(self) -> int:
        """See `Device.taken_bytes`: what is evicted goes back at once."""
        return self.resident_bytes()

    def counters(self) -> Counters:
        """See `Device.counters`."""
        with self._mutex:
            self._inspect()
            if self._error is not None:
                error, self._error = self._error, None
                raise spill_failure(*error)
            peak, self._peak = self._peak, self._used
            return self._tally.counters(self.resident_bytes(), peak * self.page_bytes)

    def events(self) -> list[Event]:
        """See `Device.events`."""
        with self._mutex:
            return self._tally.take_events()

    def close(self) -> None:
        """See `Device.close`."""
        if self._closed or os.getpid() != self._process:
            return
        # Retired, and one of the threads, which cannot end itself, has collected the last storage.
        if threading.current_thread() in self._threads:
            threading.Thread(target=self.close, name="dynoffload-closing", daemon=True).start()
            return
        self._closed = True
        self._stop()
        self._storages.clear()
        self._rows.clear()
        self._mapping.close()
        self._spill.close()
