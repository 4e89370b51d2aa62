"""When the transfers of the moved gaps run: as much as can be beside compute.

`Windows` sweeps twice over the slots. From the end to the start, fetches get the latest seconds
before they are due; from the start to the end, writes get the earliest after their content was
made. In slots beyond those of its uses a transfer must find room. The rest is exposed. Which sweep
goes first is up to the caller: it takes link and room from the other.

Each sweep serves in the order of deadlines, which hides most where there is room for all (Horn
1974), in O((slots + gaps) log gaps) and a step for each slot in which a region waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Flag, auto
from heapq import heappop, heappush

from dynoffload.experiments.planner.layout import Layout

_EPS = 1e-12
Piece = tuple[int, float]
"""A slot, and seconds of the link in it."""


class Order(Flag):
    """How the sweeps go about it; which is best differs from case to case."""

    WRITES_FIRST = auto()
    """The sweep for writes goes before the one for fetches."""
    NEAR = auto()
    """Of fetches, the one that is due next to a slot is served first, as it takes room for the
    shortest; else the one whose gap begins last, as it has the fewest other slots."""
    SHARED_ANEW = auto()
    """In the end the link is shared anew among the windows that were found."""


PLAIN = Order(0)
ORDERS = tuple(
    writes | near for writes in (PLAIN, Order.WRITES_FIRST) for near in (PLAIN, Order.NEAR)
)
"""Those to try at first."""
_SLOTS, _REACH = 400_000, 64
"""A window reaches over so many slots in all steps together, but not over fewer than that."""
FIRST, LAST = -1, 1
"""Ranks: served before all others; takes no room beyond that of its uses."""


class Windows:
    """Where the transfers of the moved gaps run.

    Args:
        layout: the slots and gaps.
        moved: for each gap.
        order: of the sweeps.
        ranks: of fetches by their gap, and of writes by the complement ``~gap`` of the first gap
            that is moved: `FIRST`, `LAST`, or 0.

    Attributes:
        feasible: whether what is kept fits.
        exposed_s: seconds of transfers that run in pauses.
        room: bytes left in each slot.
        start: for each moved gap with a fetch, the first slot of its room.
        stop: for each moved gap, one past the last slot in which its region still takes room.
        left: for each gap, seconds of its fetch that are exposed.
        unsaved: for each content, seconds of its write that are exposed.
        work: slots that were looked at for room.
        fetch_pieces: for each gap, what of its fetch runs in which slot.
        write_pieces: for each content, what of its write runs in which slot.
    """

    def __init__(
        self,
        layout: Layout,
        moved: Sequence[bool],
        order: Order = PLAIN,
        ranks: Mapping[int, int] | None = None,
    ) -> None:
        self.layout, self.moved = layout, moved
        self.room = room_of(layout, moved)
        self.feasible = min(self.room, default=0) >= 0
        self.exposed_s = float("inf")
        self.start = list(layout.after)
        self.stop = [before + 1 for before in layout.before]
        self.work = 0
        self._reach = max(_REACH, _SLOTS // max(1, layout.slots))
        self.left = [0.0] * len(layout)
        self.unsaved = [0.0] * len(layout.begins)
        self.fetch_pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        self.write_pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        if not self.feasible:
            return
        self._link = list(layout.seconds)
        self._ranks = ranks or {}
        self._near = Order.NEAR in order
        if Order.WRITES_FIRST in order:
            self._writes()
            self._fetches()
        else:
            self._fetches()
            self._writes()
        if Order.SHARED_ANEW in order:
            self._relink()
        self.exposed_s = sum(self.left) + sum(self.unsaved)

    def _fetches(self) -> None:
        layout, room, link, start, left = self.layout, self.room, self._link, self.start, self.left
        before, stop, sizes = layout.before, self.stop, layout.size
        due: list[list[int]] = [[] for _ in range(layout.slots)]
        for gap, moves in enumerate(self.moved):
            if moves and layout.fetch[gap]:
                left[gap] = layout.read_s[gap]
                if layout.after[gap] > 0 and self._ranks.get(gap, 0) <= 0:
                    due[layout.after[gap] - 1].append(gap)
        heap: list[tuple[int, int]] = []
        after = layout.after
        key = list(after) if self._near else [-slot for slot in before]
        for gap, rank in self._ranks.items():
            key[gap] += rank * 2 * layout.slots
        for slot in range(layout.slots - 1, -1, -1):
            for gap in due[slot]:
                heappush(heap, (key[gap], gap))
            free = link[slot]
            while heap and free > _EPS:
                gap = heap[0][1]
                first, size = start[gap], sizes[gap]
                if slot < max(stop[gap], after[gap] - self._reach):
                    heappop(heap)
                    continue
                self.work += first - slot
                if first > slot and min(room[slot:first]) < size:
                    heappop(heap)  # there is no room from here to its use
                    continue
                for place in range(slot, first):
                    room[place] -= size
                start[gap] = slot
                part = min(free, left[gap])
                self.fetch_pieces[gap].append((slot, part))
                free -= part
                left[gap] -= part
                if left[gap] <= _EPS:
                    left[gap] = 0.0
                    heappop(heap)
            link[slot] = free

    def _writes(self) -> None:
        layout, room, link, stop = self.layout, self.room, self._link, self.stop
        sizes, start, unsaved = layout.size, self.start, self.unsaved
        made: list[list[tuple[int, int, int]]] = [[] for _ in range(layout.slots)]
        for content, gaps in enumerate(layout.gaps_of):
            first = next((gap for gap in gaps if self.moved[gap]), -1)
            if first >= 0:
                unsaved[content] = layout.write_s[first]
                if layout.begins[content] + 1 < layout.slots:
                    rank = self._ranks.get(~first, 0)
                    entry = (layout.before[first] + rank * 2 * layout.slots, content, first)
                    made[layout.begins[content] + 1].append(entry)
        heap: list[tuple[int, int, int]] = []
        for slot, entries in enumerate(made):
            for entry in entries:
                heappush(heap, entry)
            free = link[slot]
            while heap and free > _EPS:
                _, content, gap = heap[0]
                last, size = stop[gap], sizes[gap]
                if slot >= last:
                    end = min(start[gap], layout.before[gap] + self._reach)
                    if self._ranks.get(~gap, 0) > 0 or slot >= end:
                        heappop(heap)
                        continue
                    self.work += slot + 1 - last
                    if min(room[last : slot + 1]) < size:
                        heappop(heap)
                        continue
                    for place in range(last, slot + 1):
                        room[place] -= size
                    stop[gap] = slot + 1
                part = min(free, unsaved[content])
                self.write_pieces[content].append((slot, part))
                free -= part
                unsaved[content] -= part
                if unsaved[content] <= _EPS:
                    unsaved[content] = 0.0
                    heappop(heap)
            link[slot] = free

    def _relink(self) -> None:
        """Share the link anew among the windows that were found: the earliest deadline first."""
        layout, left, unsaved = self.layout, self.left, self.unsaved
        link = list(layout.seconds)
        ready: list[list[tuple[int, int]]] = [[] for _ in range(layout.slots)]
        count = len(layout)
        for gap, moves in enumerate(self.moved):
            if moves and layout.fetch[gap]:
                left[gap] = layout.read_s[gap]
                if self.start[gap] < layout.after[gap]:
                    ready[self.start[gap]].append((layout.after[gap], gap))
        for content, gaps in enumerate(layout.gaps_of):
            first = next((gap for gap in gaps if self.moved[gap]), -1)
            if first >= 0:
                unsaved[content] = layout.write_s[first]
                if layout.begins[content] + 1 < self.stop[first]:
                    entry = (self.stop[first], count + content)
                    ready[layout.begins[content] + 1].append(entry)
        self.fetch_pieces.clear()
        self.write_pieces.clear()
        heap: list[tuple[int, int]] = []
        for slot, jobs in enumerate(ready):
            for job in jobs:
                heappush(heap, job)
            free = link[slot]
            while heap and free > _EPS:
                end, number = heap[0]
                if end <= slot:
                    heappop(heap)
                    continue
                fetch = number < count
                where = left if fetch else unsaved
                pieces = self.fetch_pieces if fetch else self.write_pieces
                place = number if fetch else number - count
                part = min(free, where[place])
                pieces[place].append((slot, part))
                free -= part
                where[place] -= part
                if where[place] <= _EPS:
                    where[place] = 0.0
                    heappop(heap)


def room_of(layout: Layout, moved: Sequence[bool]) -> list[int]:
    """Return the bytes left in each slot by what is touched and kept; below 0 it does not fit."""
    change = [0] * (layout.slots + 2)
    before, after, sizes = layout.before, layout.after, layout.size
    for gap, moves in enumerate(moved):
        if not moves:
            change[before[gap] + 1] += sizes[gap]
            change[after[gap]] -= sizes[gap]
    room, kept, capacity = [], 0, layout.problem.capacity
    for slot, need in enumerate(layout.need):
        kept += change[slot]
        room.append(capacity - need - kept)
    return room
