"""Base class of the devices written in Python: regions, plan and eviction order.

Subclass-specific code is in `mapped` and `accelerator`. All methods that are not part of `Device`
require the mutex.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

from dynoffload.memory.device import Cause, Counters, Device, Event, EventKind
from dynoffload.memory.eviction_order import EvictionOrder
from dynoffload.memory.spill import NoFile, SpillFile
from dynoffload.planning.cursor import NEVER, PlanCursor
from dynoffload.planning.schedule import Kind

Span = Callable[[], tuple[float, float] | None]
"""Returns begin and end on `time.perf_counter`'s clock; None until it has ended."""
_EVENTS = 65536  # kept between two calls of `Device.events`; further ones are counted as lost


@dataclass
class Tally(Counters):
    """Totals and events of one device."""

    _events: list[Event] = field(default_factory=list)
    _pending: list[tuple[Span, EventKind, Cause, int, int]] = field(default_factory=list)

    def begun(self, span: Span, kind: EventKind, cause: Cause, region: int, nbytes: int) -> None:
        """Record a copy, or a wait of the compute stream, that was queued on a stream."""
        self._pending.append((span, kind, cause, region, nbytes))

    def _drain(self) -> None:
        pending, self._pending = self._pending, []
        for one in pending:
            span, kind, cause, region, nbytes = one
            if (found := span()) is None:
                self._pending.append(one)
                continue
            self.note(kind, cause, region, found[0], nbytes, found[1])
            if kind is EventKind.STALL:
                self.stall_s += found[1] - found[0]

    def note(
        self,
        kind: EventKind,
        cause: Cause,
        region: int,
        start: float,
        nbytes: int,
        end: float | None = None,
    ) -> None:
        """Record an event; it ends now unless ``end`` is given."""
        if len(self._events) == _EVENTS:
            self.events_lost += 1
            return
        end = time.perf_counter() if end is None else end
        self._events.append(Event(start, end, nbytes, region, kind, cause))

    def take_events(self) -> list[Event]:
        """Return and clear the events."""
        self._drain()
        events, self._events = self._events, []
        return events

    def counters(self, resident_bytes: int, peak_bytes: int) -> Counters:
        """Return the totals."""
        self._drain()
        self.resident_bytes, self.peak_bytes = resident_bytes, peak_bytes
        return Counters(*(getattr(self, one.name) for one in fields(Counters)))


@dataclass(eq=False, slots=True)
class CachedRegion:
    """One region.

    Attributes:
        region: its number.
        offset: in bytes, in the file and in the arena of addresses.
        padded: the bytes that it takes in each tier.
        nbytes: bytes of content.
        stamp: last use, for LRU.
        pins: number of pins; a pinned region is not evicted.
        prefetched: fetched by plan and not yet used.
    """

    region: int
    offset: int
    padded: int
    nbytes: int
    stamp: int = 0
    pins: int = 0
    prefetched: bool = False


Cell = TypeVar("Cell", bound=CachedRegion)


class RegionCache(Device, Generic[Cell]):
    """Tracks the bytes of a pool, and its regions by number."""

    def __init__(
        self, capacity: int, page_bytes: int, spill: SpillFile | NoFile, base: int
    ) -> None:
        super().__init__(capacity, page_bytes, spill, base)
        self._cells: dict[int, Cell] = {}
        self._order: EvictionOrder[Cell] = EvictionOrder(
            self._cells.values, self._is_evictable, self._place_in_order
        )
        self._pinned: dict[Cell, None] = {}
        self._mutex = threading.RLock()
        self._plan, self._tally = PlanCursor(), Tally()
        self._used = self._peak = self._reserve = self._clock = 0

    @abstractmethod
    def _bring(self, regions: Sequence[int], *, pin: bool, patient: bool = True) -> None:
        """Make regions present together; if not ``patient``, it may skip those that do not fit."""

    @abstractmethod
    def _forget(self, cell: Cell) -> None:
        """Release a region's memory in all tiers, and discard its content."""

    @abstractmethod
    def _is_evictable(self, cell: Cell) -> bool:
        """Return whether a region is present, and can be evicted as soon as nothing holds it."""

    @abstractmethod
    def _may_leave(self, cell: Cell) -> bool:
        """Return whether a region can be evicted now."""

    @abstractmethod
    def _may_come(self, cell: Cell) -> bool:
        """Return whether a region is absent and has content to fetch."""

    def _all(self, regions: Iterable[int]) -> list[Cell]:
        return [self._cells[region] for region in regions]

    @property
    def _free(self) -> int:
        """Bytes available without an eviction."""
        return self.capacity - self._used

    @property
    def _unpinned_bytes(self) -> int:
        """Bytes of the pool that pinned regions do not take."""
        return self.capacity - sum(cell.padded for cell in self._pinned if cell.pins)

    def _pin(self, some: Iterable[Cell], by: int) -> None:
        """Pin regions once more, or once less: ``by`` is 1 or -1."""
        for cell in some:
            if by > 0:
                self._pinned[cell] = None
            cell.pins += by
            assert cell.pins >= 0, f"region {cell.region} is unpinned more often than pinned"
            if not cell.pins:
                self._pinned.pop(cell, None)

    def _remove(self, region: int) -> Cell:
        """Stop tracking a region, with its pins."""
        cell = self._cells.pop(region)
        self._pinned.pop(cell, None)
        return cell

    def _use(self, cell: Cell) -> None:
        """Mark a region as used now."""
        self._clock += 1
        cell.stamp = self._clock
        if cell.prefetched:
            cell.prefetched = False
            self._tally.used_bytes += cell.nbytes

    def _unused(self, cell: Cell) -> None:
        """Count a leaving region as wasted if it was prefetched and not used."""
        if cell.prefetched:
            cell.prefetched = False
            self._tally.wasted_bytes += cell.nbytes

    def _place_in_order(self, cell: Cell) -> tuple[int, int]:
        return -self._plan.next_use(cell.region), cell.stamp

    def _victim(self, later_than: int) -> Cell | None:
        """Return the evictable region with the farthest next use after ``later_than``; among
        equals the least recently used."""
        return self._order.first((-later_than,), self._may_leave)

    def _follow(self, plan: PlanCursor) -> None:
        """Begin a plan."""
        self._plan = plan
        self._renew_orders()

    def _advance(self, position: int) -> None:
        """Begin a use of the plan."""
        for region in self._plan.advance(position):
            cell = self._cells.get(region)
            if cell is not None:
                self._used_later(cell)

    def _used_later(self, cell: Cell) -> None:
        """Note that a region's next use may be later than before."""
        if self._is_evictable(cell):
            self._order.add(cell)

    def _renew_orders(self) -> None:
        """Note that the next uses of all regions may have changed."""
        self._order.renew()

    def _due(self) -> tuple[Kind, Cell] | None:
        """Return the next due transfer of the plan, skipping obsolete ones."""
        while (action := self._plan.due()) is not None:
            cell = self._cells.get(action.region)
            if cell is not None:
                next_use = self._plan.next_use(cell.region)
                if action.kind is Kind.EVICT:
                    obsolete = next_use <= self._plan.position or not self._may_leave(cell)
                else:
                    obsolete = next_use == NEVER or not self._may_come(cell)
                if not obsolete:
                    return action.kind, cell
            self._plan.done()
        return None

    def touch(self, regions: Sequence[int]) -> None:
        """See `Device.touch`."""
        with self._mutex:
            room, fitting = self._unpinned_bytes, []
            for cell in self._all(dict.fromkeys(regions)):
                need = 0 if cell.pins else cell.padded
                if need <= room:
                    room -= need
                    fitting.append(cell.region)
            self._bring(fitting, pin=False, patient=False)

    def discard(self, region: int) -> None:
        """See `Device.discard`."""
        with self._mutex:
            self._forget(self._cells[region])

    def reserve(self, nbytes: int) -> None:
        """See `Device.reserve`."""
        with self._mutex:
            self._reserve = self.padded(nbytes) if nbytes else 0

    def resident_bytes(self) -> int:
        """See `Device.resident_bytes`."""
        return self._used

    def counters(self) -> Counters:
        """See `Device.counters`."""
        with self._mutex:
            peak, self._peak = self._peak, self._used
            return self._tally.counters(self._used, peak)

    def events(self) -> list[Event]:
        """See `Device.events`."""
        with self._mutex:
            return self._tally.take_events()
