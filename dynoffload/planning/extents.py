"""Allocator of page ranges, from both ends, that merges freed ranges."""

from __future__ import annotations

import bisect


class Extents:
    """Allocates runs of pages from ``range(total)``.

    Invariant: ``_starts`` is sorted; free runs neither touch nor overlap.
    """

    def __init__(self, total: int) -> None:
        self._starts = [0]
        self._lengths = [total]
        self.high = 0  # one past the highest page ever taken by `take`

    def take(self, pages: int) -> int | None:
        """Allocate ``pages`` consecutive pages, the lowest there are; return the first, or None if
        they do not fit."""
        for index, length in enumerate(self._lengths):
            if length < pages:
                continue
            start = self._starts[index]
            if length == pages:
                del self._starts[index], self._lengths[index]
            else:
                self._starts[index] += pages
                self._lengths[index] -= pages
            self.high = max(self.high, start + pages)
            return start
        return None

    def take_last(self, pages: int) -> int | None:
        """Allocate as `take` does, but the highest there are."""
        for index in reversed(range(len(self._lengths))):
            if self._lengths[index] >= pages:
                self._lengths[index] -= pages
                start = self._starts[index] + self._lengths[index]
                if not self._lengths[index]:
                    del self._starts[index], self._lengths[index]
                return start
        return None

    def give(self, start: int, pages: int) -> None:
        """Free ``pages`` pages from ``start`` on."""
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and start + pages == self._starts[index]:
            pages += self._lengths[index]
            del self._starts[index], self._lengths[index]
        if index and self._starts[index - 1] + self._lengths[index - 1] == start:
            self._lengths[index - 1] += pages
            return
        self._starts.insert(index, start)
        self._lengths.insert(index, pages)
