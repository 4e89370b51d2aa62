"""The mapped file's cache: which regions take fast memory, and who waits for them.

Plain bookkeeping under one mutex, which callers hold; nothing here takes time.

[Note: states]  A region is charged from the moment its transfer begins until its last page is gone:
READING, PRESENT and WRITING are charged, ABSENT is not. A transfer runs without the mutex; a region
in flight belongs to the thread that moves it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from dynoffload.memory.device import Cause, EventKind, called
from dynoffload.memory.region_allocator import Place, RegionAllocator
from dynoffload.memory.spill import SpillFile
from dynoffload.memory.tally import Tally
from dynoffload.planning.cursor import PlanCursor


class State(Enum):
    """Where a region's bytes are; see [Note: states]."""

    ABSENT = "absent"
    READING = "reading"
    PRESENT = "present"
    WRITING = "writing"

    @property
    def moving(self) -> bool:
        """A transfer is on its way, or was asked for and cannot be taken back."""
        return self in (State.READING, State.WRITING)


@dataclass(eq=False, slots=True)
class CachedRegion:
    """One region of the mapped file.

    Attributes:
        region: its number.
        offset: in the file, and in the arena of addresses.
        length: padded bytes.
        pages: the same in pages.
        nbytes: bytes of content.
        stamp: last use, for LRU.
        content: the file or memory may hold bytes of its own.
        cleared: the file holds zeros, unless somebody has written since without notice.
        pins: holds it in memory.
        queued: somebody waits, and its fetch has not begun.
        waited_since: when somebody began to wait.
        prefetched: fetched by plan and not yet used.
        busy: could not be written; stays until the next plan.
        error: errno of the fetch that somebody waits for.
    """

    region: int
    offset: int
    length: int
    pages: int
    nbytes: int
    stamp: int
    state: State = State.ABSENT
    content: bool = False
    cleared: bool = False
    pins: int = 0
    queued: bool = False
    waited_since: float | None = None
    prefetched: bool = False
    busy: bool = False
    error: int = 0

    def may_leave(self) -> bool:
        """Return whether it can be evicted now."""
        return (
            self.state is State.PRESENT
            and not self.pins
            and not self.busy
            and self.waited_since is None
        )

    def left_alone(self) -> bool:
        """Return whether it is absent and nobody is about to bring it in."""
        return self.state is State.ABSENT and not self.queued


class MappedCache(RegionAllocator):
    """Counts the pages of a pool.

    Args:
        pages: pages there are.
        page_bytes: of each.
        spill: the file.
        base: address of its first page.
    """

    def __init__(self, pages: int, page_bytes: int, spill: SpillFile, base: int) -> None:
        super().__init__(pages * page_bytes, page_bytes, spill, base)
        self._tally = Tally()
        self._mutex = threading.RLock()
        # Told when there may be a transfer to make, and when one is over or a pin is gone.
        self._work, self._done = threading.Condition(self._mutex), threading.Condition(self._mutex)
        self._cached: dict[int, CachedRegion] = {}
        self._urgent: deque[CachedRegion] = deque()  # those that somebody waits for
        self._plan = PlanCursor()
        self._pages, self._used = pages, 0  # pages there are, and those charged
        self._writing = 0  # pages on their way out, among those charged
        self._reserve = 0  # pages that plans leave free
        self._peak = 0
        self._error: tuple[int, str] | None = None  # of the last failed transfer, until it is told
        self._write_error: tuple[int, str] | None = None  # of the last write, while writes fail
        self._clock = 0
        self._waiting = 0  # regions that somebody waits for, now
        self._waiting_since = 0.0

    def _admit(self, region: int, place: Place) -> None:
        offset, length = place.page * self.page_bytes, place.pages * self.page_bytes
        with self._mutex:
            self._clock += 1
            self._cached[region] = CachedRegion(
                region, offset, length, place.pages, place.nbytes, self._clock
            )

    def _all(self, regions: Iterable[int]) -> list[CachedRegion]:
        return [self._cached[region] for region in regions]

    def _called(self, h: CachedRegion) -> str:
        return called(self.names, h.region, h.nbytes)

    # Room

    @property
    def _free(self) -> int:
        """Pages that can be had without an eviction."""
        return self._pages - self._used

    def _charge(self, h: CachedRegion) -> None:
        """Take room for a region; there must be some."""
        self._used += h.pages
        assert self._used <= self._pages, "the cache would pass the capacity"
        self._peak = max(self._peak, self._used)

    def _discharge(self, h: CachedRegion) -> None:
        """Give a region's room back."""
        self._used -= h.pages

    def _victim(self, later_than: int) -> CachedRegion | None:
        """Return the region used latest among those that may leave and are used after
        ``later_than``; among equals the least recently used."""
        best: tuple[int, int] | None = None
        found = None
        for h in self._cached.values():
            if h.may_leave():
                next_use = self._plan.next_use(h.region)
                if next_use > later_than and (best is None or (next_use, -h.stamp) > best):
                    best, found = (next_use, -h.stamp), h
        return found

    # Uses and waits

    def _use(self, h: CachedRegion) -> None:
        """The region is used now."""
        self._clock += 1
        h.stamp = self._clock
        if h.prefetched:
            h.prefetched = False
            self._tally.used_bytes += h.nbytes

    def _waste(self, h: CachedRegion) -> None:
        """The region goes; if nobody used it, fetching it was a waste."""
        if h.prefetched:
            h.prefetched = False
            self._tally.wasted_bytes += h.nbytes

    def _pin(self, some: Sequence[CachedRegion], by: int) -> None:
        """Hold regions in memory, or let go of them with a negative ``by``."""
        for h in some:
            h.pins += by
        if by < 0:
            self._work.notify_all()
            self._done.notify_all()

    def _want(self, h: CachedRegion) -> None:
        """Somebody waits for the region: it goes before all that is planned."""
        if h.state is State.PRESENT:
            return
        if h.waited_since is None and (h.content or self._free < h.pages):
            h.waited_since = time.perf_counter()
            if self._waiting == 0:
                self._waiting_since = h.waited_since
            self._waiting += 1
            self._tally.stalls += 1
        if h.left_alone():
            h.queued = True
            self._urgent.append(h)
            self._work.notify()

    def _give_up(self, some: Sequence[CachedRegion]) -> None:
        """Stop waiting for regions that only the caller has pinned."""
        for h in some:
            if h.queued and h.pins == 1:
                self._urgent.remove(h)
                h.queued = False
                self._end_wait(h)
        self._done.notify_all()

    def _settle(self, h: CachedRegion, state: State) -> None:
        """A transfer is over."""
        h.state = state
        if state is State.PRESENT or h.error:
            self._end_wait(h)
        self._done.notify_all()
        self._work.notify_all()

    def _end_wait(self, h: CachedRegion) -> None:
        if h.waited_since is None:
            return
        self._waiting -= 1
        if self._waiting == 0:
            self._tally.stall_s += time.perf_counter() - self._waiting_since
        self._tally.note(EventKind.STALL, Cause.FAULT, h.region, h.waited_since, h.nbytes)
        h.waited_since = None
