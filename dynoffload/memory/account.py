"""The mapped-file device's account: which regions take fast memory, who waits, what has happened.

Plain bookkeeping under one mutex, which its callers hold; nothing here takes time.

[Note: states]  A region is charged to the account from the moment its transfer begins until its
last page is gone: READING, PRESENT and WRITING are charged, ABSENT is not. A transfer runs without
the mutex; a region in flight belongs to the thread that moves it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dynoffload.memory.device import Cause, Counters, EventKind
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
class Holding:
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


class Account(Tally):
    """Counts the pages of a pool.

    Args:
        pool: pages there are.

    Attributes:
        mutex: held by whoever reads or changes anything here.
        work: told when there may be a transfer to make.
        done: told when a transfer is over or a pin is gone.
        holdings: the regions.
        urgent: those that somebody waits for, in order.
        plan: what is followed.
        pool: pages there are.
        used: pages charged, at most ``pool``.
        writing: of them, pages on their way out.
        reserve: pages that plans leave free.
        error: errno and message of the last failed transfer, until it is told.
        write_error: the same of the last write, while writes fail.
    """

    def __init__(self, pool: int) -> None:
        super().__init__()
        self.mutex = threading.RLock()
        self.work, self.done = threading.Condition(self.mutex), threading.Condition(self.mutex)
        self.holdings: dict[int, Holding] = {}
        self.urgent: deque[Holding] = deque()
        self.plan = PlanCursor()
        self.pool = pool
        self.used = self.writing = self.reserve = self.peak = 0
        self.error: tuple[int, str] | None = None
        self.write_error: tuple[int, str] | None = None
        self._clock = 0
        self._waiting = 0  # regions that somebody waits for, now
        self._waiting_since = 0.0

    def admit(self, region: int, offset: int, length: int, pages: int, nbytes: int) -> None:
        """Begin to look after a region."""
        self._clock += 1
        self.holdings[region] = Holding(region, offset, length, pages, nbytes, self._clock)

    # Room

    @property
    def free(self) -> int:
        """Pages that can be had without an eviction."""
        return self.pool - self.used

    def charge(self, h: Holding) -> None:
        """Take room for a region; there must be some."""
        self.used += h.pages
        assert self.used <= self.pool, "the account would pass the capacity"
        self.peak = max(self.peak, self.used)

    def discharge(self, h: Holding) -> None:
        """Give a region's room back."""
        self.used -= h.pages

    def victim(self, later_than: int) -> Holding | None:
        """Return the region used latest among those that may leave and are used after
        ``later_than``; among equals the least recently used."""
        best: tuple[int, int] | None = None
        found = None
        for h in self.holdings.values():
            if h.may_leave():
                next_use = self.plan.next_use(h.region)
                if next_use > later_than and (best is None or (next_use, -h.stamp) > best):
                    best, found = (next_use, -h.stamp), h
        return found

    # Uses and waits

    def use(self, h: Holding) -> None:
        """The region is used now."""
        self._clock += 1
        h.stamp = self._clock
        if h.prefetched:
            h.prefetched = False
            self.used_bytes += h.nbytes

    def waste(self, h: Holding) -> None:
        """The region goes; if nobody used it, fetching it was a waste."""
        if h.prefetched:
            h.prefetched = False
            self.wasted_bytes += h.nbytes

    def pin(self, holdings: Sequence[Holding], by: int) -> None:
        """Hold regions in memory, or let go of them with a negative ``by``."""
        for h in holdings:
            h.pins += by
        if by < 0:
            self.work.notify_all()
            self.done.notify_all()

    def want(self, h: Holding) -> None:
        """Somebody waits for the region: it goes before all that is planned."""
        if h.state is State.PRESENT:
            return
        if h.waited_since is None and (h.content or self.free < h.pages):
            h.waited_since = time.perf_counter()
            if self._waiting == 0:
                self._waiting_since = h.waited_since
            self._waiting += 1
            self.stalls += 1
        if h.state is State.ABSENT and not h.queued:
            h.queued = True
            self.urgent.append(h)
            self.work.notify()

    def give_up(self, holdings: Sequence[Holding]) -> None:
        """Stop waiting for regions that only the caller has pinned."""
        for h in holdings:
            if h.queued and h.pins == 1:
                self.urgent.remove(h)
                h.queued = False
                self._end_wait(h)
        self.done.notify_all()

    def settle(self, h: Holding, state: State) -> None:
        """A transfer is over."""
        h.state = state
        if state is State.PRESENT or h.error:
            self._end_wait(h)
        self.done.notify_all()
        self.work.notify_all()

    def _end_wait(self, h: Holding) -> None:
        if h.waited_since is None:
            return
        self._waiting -= 1
        if self._waiting == 0:
            self.stall_s += time.perf_counter() - self._waiting_since
        self.note(EventKind.STALL, Cause.FAULT, h.region, h.waited_since, h.nbytes)
        h.waited_since = None

    def take_counters(self, page_bytes: int) -> Counters:
        """Return the totals; the peak begins anew."""
        peak, self.peak = self.peak, self.used
        return self.counters(self.used * page_bytes, peak * page_bytes)
