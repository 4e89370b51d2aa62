"""The order in which regions are evicted, kept so that the first is found without a scan.

[Note: lazy order]  A use or the plan's progress changes a region's place, far more often than a
region is evicted. So the heap's entries may be out of date, but only in one direction: each member
has an entry at its place or before it. One that is before it is corrected as it comes to the front.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Member = TypeVar("Member")
Place = tuple[int, ...]
"""A member's place in the order; it differs from that of each other member."""

_SPARE = 64  # outdated entries that are always allowed


class EvictionOrder(Generic[Member]):
    """Members by place, the lowest first.

    Args:
        candidates: returns all that may be members.
        place: returns the place of a candidate now; None if it is not a member.
    """

    def __init__(
        self,
        candidates: Callable[[], Iterable[Member]],
        place: Callable[[Member], Place | None],
    ) -> None:
        self._candidates, self._place = candidates, place
        self._entries: list[tuple[Place, Member]] = []  # a heap, see [Note: lazy order]
        self._limit = _SPARE

    def add(self, member: Member) -> None:
        """Note a new member, or one whose place may be lower than before; ignore others."""
        place = self._place(member)
        if place is not None:
            heapq.heappush(self._entries, (place, member))
            if len(self._entries) > self._limit:
                self.renew()

    def renew(self) -> None:
        """Note that all places may have changed."""
        placed = [(self._place(member), member) for member in self._candidates()]
        entries = [(place, member) for place, member in placed if place is not None]
        heapq.heapify(entries)
        self._entries, self._limit = entries, 2 * len(placed) + _SPARE

    def first(self, before: Place, may_leave: Callable[[Member], bool]) -> Member | None:
        """Return the first member that may leave now, with a place lower than ``before``."""
        passed_over: list[tuple[Place, Member]] = []
        try:
            while self._entries:
                noted, member = self._entries[0]
                place = self._place(member)
                if place is None:
                    heapq.heappop(self._entries)
                elif place != noted:
                    heapq.heapreplace(self._entries, (place, member))
                elif place >= before:
                    break
                elif may_leave(member):
                    return member
                else:
                    passed_over.append(heapq.heappop(self._entries))
        finally:
            for entry in passed_over:
                heapq.heappush(self._entries, entry)
        return None
