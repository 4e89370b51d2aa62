"""The CPU's device where userfaultfd is refused: regions are a shared mapping of the spill file.

An access to an absent region is served by the kernel, unasked and unseen, so results are exact as
with the pager; but the kernel gives memory without asking the budget. Residency is therefore an
account of the device's own: it brings regions in and out by explicit requests and never lets the
account pass the capacity. What was touched without notice is found later, by looking at the page
cache, and then counted or sent out. So the cap holds for all that is announced and is restored
soon for the rest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dynoffload.errors import BackendError, SpillError
from dynoffload.memory.account import Account, Holding, State
from dynoffload.memory.debug import Checksums
from dynoffload.memory.device import Counters, Event
from dynoffload.memory.mapping import Mapping
from dynoffload.memory.region_allocator import Place, RegionAllocator, arena_pages
from dynoffload.memory.spill import UNREAD, UNWRITTEN, SpillFile
from dynoffload.memory.spill import failure as spill_failure
from dynoffload.memory.transfers import Transfers
from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.schedule import Schedule, Use

_GRACE_S = 60.0  # how long to wait for somebody to unpin


class MappedFile(RegionAllocator):
    """A `Device` whose absent memory is the file itself (Linux).

    Args:
        capacity: bytes that the account may reach.
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
        pages = capacity // page_bytes
        super().__init__(pages * page_bytes, page_bytes, spill, mapping.address)
        self._process = os.getpid()
        self._closed = False
        self._mapping = mapping
        self._account = Account(pages)
        sums = Checksums(spill.fd) if debug else None
        self._transfers = Transfers(self._account, mapping, spill, threads, self.names, sums)

    # Regions

    def _admit(self, region: int, place: Place) -> None:
        page = self.page_bytes
        with self._account.mutex:
            self._account.admit(
                region, place.page * page, place.pages * page, place.pages, place.nbytes
            )

    def _dismiss(self, region: int) -> None:
        with self._account.mutex:
            self._transfers.forget(self._account.holdings[region])
            del self._account.holdings[region]

    def discard(self, region: int) -> None:
        """See `Device.discard`."""
        with self._account.mutex:
            self._transfers.forget(self._account.holdings[region])

    def clear(self, regions: Sequence[int]) -> None:
        """See `Device.clear`.

        Raises:
            SpillError: zeros cannot be written where the file system keeps none unwritten.
        """
        account = self._account
        with account.mutex:
            for region in regions:
                self._transfers.clear(account.holdings[region])

    def is_clear(self, regions: Sequence[int]) -> list[bool]:
        """See `Device.is_clear`."""
        account = self._account
        with account.mutex:
            return [self._transfers.is_clear(account.holdings[region]) for region in regions]

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
        account = self._account
        with account.mutex:
            wanted = [account.holdings[region] for region in regions]
            account.pin(wanted, 1)
            kept = False
            try:
                self._bring(wanted, patient=True)
                kept = pin
            finally:
                if not kept:
                    account.pin(wanted, -1)

    def touch(self, regions: Sequence[int]) -> None:
        """Bring the regions in, as many as there is room for, since no access tells of itself.

        Raises:
            SpillError: the spill file cannot be read.
        """
        account = self._account
        with account.mutex:
            wanted: list[Holding] = []
            held = sum(h.pages for h in account.holdings.values() if h.pins)
            for region in dict.fromkeys(regions):
                h = account.holdings[region]
                more = 0 if h.pins else h.pages
                if held + more <= account.pool:
                    held += more
                    wanted.append(h)
            account.pin(wanted, 1)
            try:
                self._bring(wanted, patient=False)
            finally:
                account.pin(wanted, -1)

    def unpin(self, regions: Sequence[int]) -> None:
        """See `Device.unpin`."""
        account = self._account
        with account.mutex:
            account.pin([account.holdings[region] for region in regions], -1)

    def _bring(self, wanted: Sequence[Holding], *, patient: bool) -> None:
        """Wait until pinned regions are present, lending a hand; the impatient leave what all
        others' pins keep out."""
        account = self._account
        self._transfers.hope()
        for h in wanted:
            account.use(h)
            h.error = 0
        until = time.monotonic() + _GRACE_S
        while absent := [h for h in wanted if h.state is not State.PRESENT]:
            for h in absent:
                if h.error:
                    failure, h.error = h.error, 0
                    account.give_up(wanted)
                    told = self._transfers.unreadable(h, failure)
                    raise spill_failure(failure, f"{told}; {UNREAD}")
                account.want(h)
            if self._transfers.serve_urgent():
                until = time.monotonic() + _GRACE_S
                continue
            if not patient and not any(h.state.moving for h in account.holdings.values()):
                account.give_up(wanted)
                return
            if (refused := self._transfers.refused()) is not None:
                account.give_up(wanted)
                number, told = refused
                raise spill_failure(number, f"{told}; {UNWRITTEN}")
            if not account.done.wait(1.0) and time.monotonic() > until:
                account.give_up(wanted)
                pinned = [h.region for h in account.holdings.values() if h.pins]
                waited = f" within {_GRACE_S:.0f} s"
                raise self._no_room([h.region for h in absent], pinned, waited)

    # The plan

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """See `Device.follow`."""
        plan = PlanCursor(uses, schedule.actions)
        account = self._account
        with account.mutex:
            account.plan = plan
            for h in account.holdings.values():
                h.busy = False  # what could not be written then may be written now
            self._transfers.inspect()
            account.work.notify_all()

    def advance(self, position: int) -> None:
        """See `Device.advance`. What the use names counts as used: its accesses are not seen."""
        account = self._account
        with account.mutex:
            account.plan.advance(position)
            for region in account.plan.regions():
                h = account.holdings.get(region)
                if h is not None and h.state is State.PRESENT:
                    account.use(h)
            account.work.notify_all()

    def reserve(self, nbytes: int) -> None:
        """See `Device.reserve`."""
        with self._account.mutex:
            self._account.reserve = -(-nbytes // self.page_bytes)
            self._account.work.notify_all()

    # What happened

    def resident(self) -> list[int]:
        """See `Device.resident`."""
        with self._account.mutex:
            holdings = self._account.holdings.values()
            return sorted(h.region for h in holdings if h.state is not State.ABSENT)

    def resident_bytes(self) -> int:
        """See `Device.resident_bytes`."""
        with self._account.mutex:
            return self._account.used * self.page_bytes

    def taken_bytes(self) -> int:
        """See `Device.taken_bytes`: what is evicted goes back at once."""
        return self.resident_bytes()

    def counters(self) -> Counters:
        """See `Device.counters`."""
        account = self._account
        with account.mutex:
            self._transfers.inspect()
            if account.error is not None:
                error, account.error = account.error, None
                raise spill_failure(*error)
            return account.take_counters(self.page_bytes)

    def events(self) -> list[Event]:
        """See `Device.events`."""
        with self._account.mutex:
            return self._account.take_events()

    def close(self) -> None:
        """See `Device.close`."""
        if self._closed or os.getpid() != self._process:
            return
        if self._transfers.run_here():  # retired, and one of them has collected the last storage
            threading.Thread(target=self.close, name="dynoffload-closing", daemon=True).start()
            return
        self._closed = True
        self._transfers.stop()
        self._storages.clear()
        self._rows.clear()
        self._mapping.close()
        self._spill.close()
