"""The device of an accelerator: regions in its memory, with host memory and a file below it.

Regions are made present before use. The runtime announces work that touches regions
(`Accelerator.use`), and absent ones are present when that work begins, in stream order. An absent
region's storage is empty, so that its tensors and all their aliases keep their identity.

[Note: ahead]  Room that is free only once a copy out has ended could be reused at once, with the
compute stream made to wait. A copy in that follows would wait with it, and begin no sooner than
the work that needs it. So plans use only room that is already free. And the host may run ahead of
the accelerator by a few uses only, as it would find no such room further ahead. That is a number of
uses, not of milliseconds: what a plan fetches is due some uses before its own, however long they
are. With more uses ahead the host is blocked less, but more of them come to regions that have found
no room, and the accelerator waits for those copies instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.pool import UNKNOWN, RegionPool
from dynoffload.memory.accelerator.region import DeviceRegion, State
from dynoffload.memory.accelerator.rows import unseen
from dynoffload.memory.accelerator.storages import RegionStorage
from dynoffload.memory.accelerator.streams import hidden
from dynoffload.memory.device import Cause, Counters
from dynoffload.memory.region_allocator import Place, users_of
from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.schedule import Kind, Schedule, Use
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)

_Made = TypeVar("_Made")

_LENT = 8  # one over the part of the pool that lent regions may take
_READ_AHEAD = 8  # planned fetches whose bytes are read from the file in advance


class Accelerator(RegionPool):
    """A `Device` whose regions are tensors of an accelerator.

    Attributes:
        on_locked: called on the accessing thread, with a locked region that it is about to use;
            must unlock the region or raise.
    """

    serves, guarded = False, True

    # Regions

    def _admit(self, region: int, place: Place) -> None:
        padded = place.pages * self.page_bytes
        if self._host_budget is not None and padded > self._host_budget:
            raise BudgetError(
                f"a region of {format_bytes(place.nbytes)} does not fit host memory of "
                f"{format_bytes(self._host_budget)}: raise host_budget"
            )
        storage = RegionStorage(0, device=self._streams.device)  # type: ignore[no-untyped-call]

        def bring(writes: bool, lends: bool) -> None:
            if lends:
                self.lend(region)
            elif writes:
                self.acquire([region])
            else:
                self.meet_owner([region])
                self._bring([region], pin=False)

        offset = place.page * self.page_bytes
        with self._mutex:
            self._clock += 1
            cell = DeviceRegion(region, offset, padded, place.nbytes, self._clock, storage=storage)
            self._cells[region] = cell
            self.regions[storage._cdata] = region
        storage.bring, storage.content = bring, place.nbytes

    def _dismiss(self, region: int) -> None:
        with self._mutex:
            cell = self._cells[region]
            self._forget(cell)
            cell.storage.bring = None
            self._locked.discard(region)
            self._lent.pop(region, None)
            self._failed.pop(self._remove(region), None)
            del self.regions[cell.storage._cdata]

    def storage(self, region: int) -> torch.UntypedStorage:
        """See `Device.storage`: it is empty while the region is absent."""
        return self._cells[region].storage

    @contextlib.contextmanager
    def scratch(self, nbytes: int, what: str) -> Iterator[torch.UntypedStorage]:
        """Yield a storage on the accelerator that counts as regions do, and is freed at the end.

        Args:
            nbytes: size of the storage.
            what: its purpose, for the error.

        Raises:
            BudgetError: there is no room next to the pinned regions.
        """
        padded = self.padded(nbytes)
        storage = RegionStorage(0, device=self.device)  # type: ignore[no-untyped-call]
        cell = DeviceRegion(-1, 0, padded, nbytes, pins=1, storage=storage)
        with self._mutex:
            self._clock += 1
            cell.stamp = self._clock
            free = self._unpinned_bytes
            if padded > free:
                raise BudgetError(
                    f"{what} takes {format_bytes(nbytes)} at once, and the pool of "
                    f"{format_bytes(self.capacity)} has {format_bytes(free)} beside what is held: "
                    "raise the budget, or let operators take it slice by slice"
                )
            with hidden():
                self._make_room(cell.padded, True, [])
                while not self._fill(cell, True):
                    pass
        try:
            yield cell.storage
        finally:
            with self._mutex, hidden():
                self._empty(cell)

    # Uses

    def use(self, regions: Sequence[int], written: Sequence[int] = ()) -> None:
        """Announce work on ``regions`` that is about to be enqueued on the compute stream.

        They are on the accelerator when it begins, and stay until `used`.

        Args:
            regions: all of them.
            written: those that it modifies.

        Raises:
            BudgetError: they do not fit together, or pins leave no room.
            SpillError: the file cannot be read or written.
        """
        self.meet_owner(regions)
        self._bring(regions, pin=True)
        with self._mutex:
            for cell in self._all(written):
                self._written(cell)

    def at_once(
        self, regions: Sequence[int], written: Sequence[int], enqueue: Callable[[], _Made]
    ) -> tuple[bool, _Made | None]:
        """Call ``enqueue`` if that needs neither to fetch nor to wait for what it works on.

        Args:
            regions: that it works on.
            written: those that it modifies; others are not looked at.
            enqueue: enqueues the work. No region is evicted meanwhile.

        Returns:
            Whether it was called, and its result.
        """
        with self._mutex:
            # One store, which no signal parts, holds them: a handler may use the model.
            before = self._at_work
            try:
                self._at_work = [*before, *regions]
                cells = [self._cells[region] for region in regions]
                for cell in cells:
                    if cell.state is not State.PRESENT or cell.ready is not None or cell.prefetched:
                        return False, None
                    if self._locked and cell.region in self._locked:
                        return False, None
                    self._clock += 1
                    cell.stamp, cell.tick = self._clock, UNKNOWN
                for region in written:
                    if region >= 0:
                        self._written(self._cells[region])
                made = enqueue()
                for cell in cells:
                    cell.tick = self._now
                return True, made
            finally:
                self._at_work = before

    def are_here(self, regions: Sequence[int]) -> bool:
        """Return whether work on all ``regions`` need neither fetch nor wait."""
        with self._mutex:
            return all(
                cell.state is State.PRESENT and (cell.ready is None or cell.ready.reached())
                for cell in self._all(regions)
            )

    def used(self, regions: Sequence[int]) -> None:
        """Report that the work announced by `use` has been enqueued."""
        with self._mutex:
            for region in regions:
                cell = self._cells.get(region)
                if cell is not None:
                    self._pin([cell], -1)
                    cell.tick = self._now

    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """See `Device.acquire`. It counts as a write to the regions."""
        self.meet_owner(regions)
        with self._mutex:  # throughout: an unpinned region could be evicted before the write counts
            self._bring(regions, pin=pin)
            for region in regions:
                cell = self._cells[region]
                self._written(cell)
                cell.tick = UNKNOWN

    def lend(self, region: int) -> None:
        """Make a region present for a kernel that is given its address and may write it. It stays
        until `end_loans`, or until others that are lent after it take an eighth of the pool.

        Raises:
            BudgetError: it does not fit.
            SpillError: the file cannot be read or written.
        """
        self.acquire([region], pin=True)
        with self._mutex:
            if region in self._lent:
                self.unpin([region])
            self._lent[region] = None
            while sum(map(self.size, self._lent)) > self.capacity // _LENT and len(self._lent) > 1:
                self.unpin([self._lent.popitem(last=False)[0]])

    def end_loans(self) -> None:
        """Let what was lent leave: the kernels have been launched."""
        if self._lent:
            with self._mutex:
                self.unpin(list(self._lent))
                self._lent.clear()

    def lock(self, regions: Sequence[int]) -> None:
        """See `Device.lock`."""
        self._locked.update(regions)

    def unlock(self, regions: Sequence[int]) -> None:
        """See `Device.unlock`."""
        self._locked.difference_update(regions)

    def meet_owner(self, regions: Sequence[int]) -> None:
        """Call `on_locked` until no region is locked; the device's mutex must not be held."""
        if self._locked:
            for region in regions:
                while region in self._locked:
                    self.on_locked(region)

    def unpin(self, regions: Sequence[int]) -> None:
        """See `Device.unpin`."""
        with self._mutex:
            cells = self._all(regions)
            self._pin(cells, -1)
            for cell in cells:
                cell.tick = UNKNOWN

    @unseen
    def _bring(self, regions: Sequence[int], *, pin: bool, patient: bool = True) -> None:
        with self._mutex:
            self._check_room(regions)
            cells = [self._cells[region] for region in dict.fromkeys(regions)]
            self._pin(cells, 1)
            kept = False
            try:
                for cell in cells:
                    self._enter(cell, Cause.FAULT, cells)
                for cell in cells:
                    self._use(cell)
                kept = pin
            finally:
                if not kept:
                    self._pin(cells, -1)

    def clear(self, regions: Sequence[int]) -> None:
        """See `Device.clear`."""
        with self._mutex:
            for region in regions:
                cell = self._cells[region]
                if cell.zero:
                    continue
                if cell.pins or region in self._at_work:  # it must stay present
                    self._zero(cell)
                else:
                    self._forget(cell)
                cell.zero = True

    def is_clear(self, regions: Sequence[int]) -> list[bool]:
        """See `Device.is_clear`."""
        with self._mutex:
            return [self._cells[region].zero for region in regions]

    # The plan

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """See `Device.follow`."""
        with self._mutex:
            self._follow(PlanCursor(uses, schedule.actions))
            self._go_on()

    def advance(self, position: int) -> None:
        """See `Device.advance`."""
        with self._mutex:
            behind = self._begin_use()
        if behind is not None:
            behind.wait()  # with no lock held
        with self._mutex:
            self._workspace.see(self._streams.given_bytes, self._bare)
            self._advance(position)
            self._go_on()

    @unseen
    def _go_on(self) -> None:
        """Execute what is due of the plan, as far as there is room."""
        self._reap()
        while (due := self._due()) is not None and self._carry_out(*due):
            self._plan.done()
        for region in self._plan.coming(_READ_AHEAD):
            cell = self._cells.get(region)
            if cell is not None and cell.in_file and not (cell.in_host or cell.here):
                self._read(cell, wait=False)

    def _carry_out(self, kind: Kind, cell: DeviceRegion) -> bool:
        """Begin a planned transfer; return False if there is no room for it yet."""
        if kind is Kind.EVICT:
            return self._leave(cell, Cause.PLAN)
        need = cell.padded + self._reserve
        if need > self._free:
            self._reap()
        return need <= self._free and self._enter(cell, Cause.PLAN, [cell])

    # Reports

    def resident(self) -> list[int]:
        """See `Device.resident`."""
        with self._mutex:
            return sorted(c.region for c in self._cells.values() if c.state is not State.ABSENT)

    def counters(self) -> Counters:
        """See `Device.counters`."""
        with self._mutex:
            self._check_file()
            return super().counters()

    # The end

    def keep(self, region: int) -> bool:
        """See `Device.keep`."""
        with self._mutex:
            cell = self._cells[region]
            if cell.storage.bring is None:
                return True
            self.capacity += cell.padded
            try:
                while cell.state is State.ABSENT and cell.padded > self._streams.free_bytes():
                    if not self._send_out():
                        break
                else:
                    self._bring([region], pin=True)
                    cell.storage.bring = None
                    return True
            except BudgetError:  # no room there, or in host memory for evicted regions
                pass
            self.capacity -= cell.padded
            return False

    @unseen
    def below(self, region: int) -> torch.UntypedStorage | None:
        """See `Device.below`: only if host memory has no budget, as other regions would lack it."""
        if self._host_budget is not None:
            return None
        with self._mutex:
            cell = self._cells[region]
            if cell.state is State.PRESENT and cell.is_dirty:
                self._leave(cell, Cause.ROOM)
            if not cell.in_host:
                return None
            self._settle(cell)
            cell.copied = None
            storage = self._give_away(cell)
            self._forget(cell)
            return storage

    def retire(self) -> int:
        """See `Device.retire`. Referenced storages stay on the accelerator, outside the budget."""
        try:
            self._make_ordinary()
            with self._mutex:
                held = [
                    cell
                    for cell in self._cells.values()
                    if users_of(cell.storage) > 1 and cell.storage.bring is not None
                ]
                self.capacity += sum(cell.padded for cell in held)
                for cell in held:
                    self._bring([cell.region], pin=True)
                    cell.storage.bring = None
        finally:
            self.close()
        return 0

    @unseen
    def close(self) -> None:
        """See `Device.close`."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        with self._mutex:
            for cell in self._cells.values():
                self._settle(cell)
                cell.storage.bring = None
        self._close_host()
        self._cells.clear()  # frees their memory, even if this object is still referenced
        self._renew_orders()
        self.regions.clear()
