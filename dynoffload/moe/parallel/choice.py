"""Chooses the number of parts and the strategy of a layer by timing them on a batch.

The first batch of a size goes forward and backward several times before its own step: with each
number of parts, by the strategy of least work that fits, then with each strategy. What is clearly
slower drops out (successive halving); a rank-sum test decides what is clear, so a noisy machine
takes more rounds. The choice for a size never changes, so a forward that is run again, as by
activation checkpointing, is cut as it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from statistics import median_low
from typing import NamedTuple, TypeVar

from dynoffload.errors import ConfigError
from dynoffload.moe.parallel.memory import Shape, memory
from dynoffload.planning.strategies import Strategy
from dynoffload.units import format_bytes

NUMBERS = (1, 2, 4, 8, 16)
"""Of parts, of which ``"auto"`` chooses."""

ROUNDS = 5
"""After which the quickest of those that are left is kept."""

MORE = 0.97
"""Of the time of what does less work, below which what does more is taken."""

_FAR = 1.3  # times the best one's worse one of two: so far behind two times are enough
_CHANCE = 1.96  # standard deviations of a rank sum: more is no chance, but for one in twenty

Method = TypeVar("Method", bound=Hashable)


class Choice(NamedTuple):
    """How a batch is cut.

    Attributes:
        parts: n.
        strategy: for what is overwritten.
    """

    parts: int
    strategy: Strategy


PLAIN = Choice(1, Strategy.NONE)


def quickest(methods: Sequence[Method], seconds: Callable[[Method], float]) -> Method:
    """Return the quickest method; what does more work has to be quicker by `MORE`.

    Args:
        methods: at least one, those that do less work first.
        seconds: runs a method once.
    """
    times: dict[Method, list[float]] = {one: [] for one in methods}
    left = list(methods)
    for number in range(ROUNDS):
        if len(left) == 1:
            break
        # Another order each round: a run can slow the next one.
        for one in random.Random(number).sample(left, len(left)):
            times[one].append(seconds(one))
        first = min((times[one] for one in left), key=median_low)
        left = [one for one in left if not _behind(times[one], first)]
    best = left[0]
    for one in left[1:]:
        if median_low(times[one]) < MORE * median_low(times[best]):
            best = one
    return best


def _behind(times: list[float], first: list[float]) -> bool:
    """Return whether times are clearly longer than those of the first, of which there are as many.

    Source: the rank-sum test of Wilcoxon, and Mann and Whitney.
    """
    count = len(times)
    if count < 3:
        return count == 2 and min(times) > _FAR * max(first)
    longer = sum((one > other) + 0.5 * (one == other) for one in times for other in first)
    deviation = math.sqrt(count**2 * (2 * count + 1) / 12)
    return longer - count**2 / 2 > _CHANCE * deviation


class Chooser:
    """Chooses once for all sizes within a factor of two; all ranks choose alike.

    Args:
        limit: bytes that the pipeline may hold (`dynoffload.moe.parallel.memory`); None for as
            many as it takes.
        numbers: of parts that may be taken.
        strategies: that may be taken, those of less work first.
    """

    def __init__(
        self,
        limit: int | None = None,
        numbers: Sequence[int] = NUMBERS,
        strategies: Sequence[Strategy] = tuple(Strategy),
    ) -> None:
        self._limit = limit
        self._all = [Choice(number, strategy) for strategy in strategies for number in numbers]
        self._chosen: dict[int, Choice] = {}

    def choose(
        self, shape: Shape, seconds: Callable[[Choice], float], *, offloads: bool = True
    ) -> Choice:
        """Return the choice for a batch.

        Args:
            shape: of the batch of the rank that has most tokens.
            seconds: runs a choice once on this batch, and returns the time of the slowest rank.
            offloads: what offloads may be taken, as on the CPU.

        Raises:
            ConfigError: nothing fits in the limit.
        """
        fitting = self._fitting(shape, offloads)
        upto = 1 << (shape.tokens - 1).bit_length()
        if upto not in self._chosen:
            lightest: dict[int, Choice] = {}
            for one in fitting:
                lightest.setdefault(one.parts, one)
            parts = quickest(list(lightest.values()), seconds).parts
            same = [one for one in fitting if one.parts == parts]
            self._chosen[upto] = quickest(same, seconds)
        found = self._chosen[upto]
        return found if found in fitting else fitting[0]  # larger than the one it was chosen for

    def _fitting(self, shape: Shape, offloads: bool) -> list[Choice]:
        """Return what fits in the limit, what does less work first."""
        can = [one for one in self._all if offloads or not one.strategy.offloads] or self._all
        if self._limit is None:
            return can
        needs = {one: memory(one.strategy, one.parts, shape) for one in can}
        found = [one for one in can if needs[one] <= self._limit]
        if not found:
            raise ConfigError(
                f"memory={format_bytes(self._limit)} is too little for a batch of {shape.tokens} "
                f"tokens a rank, which takes {format_bytes(min(needs.values()))} at least: raise "
                "it, or make batches smaller"
            )
        return found
