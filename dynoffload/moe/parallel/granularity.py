"""In how many parts a batch is cut: ranges of batch sizes, each with its number, found by trying.

What it is: `Granularity`, the search of MPipeMoE (arXiv 2506.22175): a size within a known range
has that range's number; for another, the numbers between those of its neighbours are tried in
order, until it gets slower, and the best one's range is widened to the size, or a new one is put
between. What it is not: the trial itself, which is a function that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUMBERS = (1, 2, 4, 8, 16)
"""Of parts, that are tried."""

_SLOWER = 1.1  # times the best: the turning point, and not the noise of a trial of one step

Trial = Callable[[int, int], float | None]
"""Of a size and a number; returns seconds, the same on all ranks, or None where it cannot be."""


@dataclass
class Range:
    """Sizes with one number.

    Attributes:
        low: the least size.
        high: the largest.
        parts: the number.
        rate: seconds for each of a batch's size, as last tried.
    """

    low: int
    high: int
    parts: int
    rate: float


class Granularity:
    """Ranges of batch sizes.

    Args:
        numbers: to be tried, in order.
    """

    def __init__(self, numbers: Sequence[int] = NUMBERS) -> None:
        self._numbers = tuple(numbers)
        self.ranges: list[Range] = []
        self.trials = 0

    def find(self, size: int, trial: Trial) -> Range | None:
        """Return the range of a size; None where no number can be.

        Args:
            size: of a batch.
            trial: is asked where it is in no range.
        """
        for one in self.ranges:
            if one.low <= size <= one.high:
                return one
        before = [one for one in self.ranges if one.high < size]
        after = [one for one in self.ranges if one.low > size]
        left, right = (before[-1] if before else None), (after[0] if after else None)
        best = self._search(size, trial, left, right)
        if best is None:
            return None
        return self._put(size, *best, left, right)

    def _search(
        self, size: int, trial: Trial, left: Range | None, right: Range | None
    ) -> tuple[int, float] | None:
        """Return the best number and its seconds, of those between the neighbours'."""
        first = left.parts if left else self._numbers[0]
        last = right.parts if right else self._numbers[-1]
        low, high = min(first, last), max(first, last)
        best: tuple[int, float] | None = None
        for number in self._numbers:
            if not low <= number <= high:
                continue
            took = trial(size, number)
            if took is None:
                continue
            self.trials += 1
            if best is None or took < best[1]:
                best = (number, took)
            elif took > _SLOWER * best[1]:
                break
        return best

    def _put(
        self, size: int, parts: int, took: float, left: Range | None, right: Range | None
    ) -> Range:
        rate = took / max(size, 1)
        joins = [one for one in (left, right) if one is not None and one.parts == parts]
        if not joins:
            made = Range(size, size, parts, rate)
            self.ranges.append(made)
            self.ranges.sort(key=lambda one: one.low)
            return made
        kept = joins[0]
        kept.low, kept.high, kept.rate = min(kept.low, size), max(kept.high, size), rate
        if len(joins) == 2:
            kept.high = joins[1].high
            self.ranges.remove(joins[1])
        return kept
