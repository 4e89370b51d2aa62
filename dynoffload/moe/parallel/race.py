"""Finds the quickest of several methods by the times of training steps.

Methods take turns, so a machine that becomes slower does so for all of them. Those that are
clearly slower drop out (successive halving). A rank-sum test decides what is clear, so a noisy
machine takes more turns. A race depends on recorded times alone, so ranks that record the same
decide alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from statistics import median_low
from typing import Generic, TypeVar

Runner = TypeVar("Runner", bound=Hashable)

ROUNDS = 25
"""After which the quickest of those that are left is kept."""

MORE = 0.97
"""Of the time of what does less work, below which what does more is taken."""

_ALIKE = 1.03  # times the best median: so near nobody drops out
_FAR = 1.3  # times the best one's worse one of two: so far behind two times are enough
_CHANCE = 1.96  # standard deviations of a rank sum: more is no chance, but for one in twenty


class Race(Generic[Runner]):
    """A race of several, one step at a time.

    Args:
        runners: at least one, those that do less work first.
        rounds: in each of which every runner that is left takes one turn.

    Attributes:
        timed_steps: times that were recorded.
    """

    def __init__(self, runners: Sequence[Runner], rounds: int = ROUNDS) -> None:
        self._times: dict[Runner, list[float]] = {one: [] for one in runners}
        self._running = list(self._times)
        self._left = list(self._running)  # who has not had a turn in this round
        self._round, self._rounds = 0, rounds
        self.timed_steps = 0

    @property
    def settled(self) -> bool:
        """Whether nobody takes turns any more."""
        return len(self._running) == 1 or self._round >= self._rounds

    @property
    def running(self) -> list[Runner]:
        """Those that have not dropped out."""
        return list(self._running)

    def turn(self, can: Callable[[Runner], bool] = lambda _: True) -> Runner | None:
        """Return who runs the next step; None where the race is settled, or nobody in it can.

        Args:
            can: whether a runner can do this step; who cannot is passed over in this round.
        """
        while not self.settled and any(map(can, self._running)):
            for one in self._left:
                if can(one):
                    return one
            self._next()
        return None

    def record(self, runner: Runner, seconds: float) -> None:
        """Take the time of a step, or of a part of one that is alike for all."""
        if runner not in self._left:
            return
        self.timed_steps += 1
        self._times[runner].append(seconds)
        self._left.remove(runner)
        if not self._left:
            self._next()

    def best(self, can: Callable[[Runner], bool] = lambda _: True) -> Runner | None:
        """Return the quickest by what is known, of those that can; None if nothing is known.

        What does more work has to be quicker than what does less, by `MORE`.
        """
        for runners in (self._running, list(self._times)):
            kept: tuple[float, Runner] | None = None
            for one in runners:
                times = self._times[one]
                if times and can(one) and (kept is None or median_low(times) < MORE * kept[0]):
                    kept = (median_low(times), one)
            if kept is not None:
                return kept[1]
        return self._running[0] if self.settled and can(self._running[0]) else None

    def _next(self) -> None:
        self._round += 1
        known = {one: times for one in self._running if (times := self._times[one])}
        if known:
            first = min(known.values(), key=median_low)
            self._running = [
                one for one in self._running if one not in known or not _behind(known[one], first)
            ]
        # Who comes after whom is another one each time: a step can slow the next one.
        self._left = list(self._running)
        random.Random(self._round).shuffle(self._left)


def _behind(times: list[float], first: list[float]) -> bool:
    """Return whether times are clearly longer than those of the first.

    Clearly is by the rank sum of Wilcoxon, and Mann and Whitney, which single slow steps do not
    move, whatever times are like.
    """
    few, count = min(len(times), len(first)), len(times) * len(first)
    if few == 2 and min(times) > _FAR * max(first):
        return True
    if few < 3 or median_low(times) <= _ALIKE * median_low(first):
        return False
    longer = sum((one > other) + 0.5 * (one == other) for one in times for other in first)
    deviation = math.sqrt(count * (len(times) + len(first) + 1) / 12)
    return longer - count / 2 > _CHANCE * deviation
