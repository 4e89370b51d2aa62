"""The order in which regions are evicted, kept so that the first is found without a scan.

[Note: lazy order]  A use or the plan's progress changes a region's place, far more often than a
region is evicted. So the heap's entries may be out of date, but only in one direction: each member
has an entry at its place or before it. One that is before it is corrected as it comes to the front.

[Note: interrupts]  A signal's exception may end any line here. It may leave entries that are out of
date or twice there, but no member without one.
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
        is_member: whether a candidate is one now.
        place: returns the place that a candidate has, or would have.
    """

    def __init__(
        self,
        candidates: Callable[[], Iterable[Member]],
        is_member: Callable[[Member], bool],
        place: Callable[[Member], Place],
    ) -> None:
        self._candidates, self._is_member, self._place = candidates, is_member, place
        self._entries: list[tuple[Place, Member]] = []  # a heap, see [Note: lazy order]
        self._passed_over: list[tuple[Place, Member]] = []  # by the last `first`
        self._limit = _SPARE

    def add(self, member: Member) -> None:
        """Note what is about to become a member, or a member's place that may be lower now."""
        heapq.heappush(self._entries, (self._place(member), member))
        if len(self._entries) > self._limit:
            self.renew()
            heapq.heappush(self._entries, (self._place(member), member))

    def renew(self) -> None:
        """Note that all places may have changed."""
        candidates = list(self._candidates())
        entries = [(self._place(one), one) for one in candidates if self._is_member(one)]
        heapq.heapify(entries)
        self._entries, self._limit = entries, 2 * len(candidates) + _SPARE
        self._passed_over.clear()

    def first(self, before: Place, may_leave: Callable[[Member], bool]) -> Member | None:
        """Return the first member that may leave now, with a place lower than ``before``."""
        while self._passed_over:
            heapq.heappush(self._entries, self._passed_over[-1])
            self._passed_over.pop()
        while self._entries:
            noted, member = self._entries[0]
            if not self._is_member(member):
                heapq.heappop(self._entries)
            elif (place := self._place(member)) != noted:
                heapq.heapreplace(self._entries, (place, member))
            elif place >= before:
                break
            elif may_leave(member):
                return member
            else:
                self._passed_over.append(self._entries[0])
                heapq.heappop(self._entries)
        return None
