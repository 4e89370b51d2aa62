"""Chooses a layer's number of parts and strategy by timing them on a batch.

The first batch of a size runs forward and backward several times before its own step: with each
number of parts, using the fitting strategy with least work, then with each strategy. The choice for
a size never changes, so a recomputed forward, as with activation checkpointing, is split the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from dynoffload.errors import ConfigError
from dynoffload.moe.parallel.memory import Shape, memory
from dynoffload.moe.parallel.strategies import Strategy
from dynoffload.units import format_bytes

NUMBERS = (1, 2, 4, 8, 16)
"""Numbers of parts among which ``"auto"`` chooses."""

ROUNDS = 3
"""How often each candidate is timed."""

MORE = 0.97
"""A method with more work is taken only if it needs less than this fraction of the time."""

Method = TypeVar("Method", bound=Hashable)


class Choice(NamedTuple):
    """How a batch is processed.

    Attributes:
        parts: number of parts, n.
        strategy: for recovering overwritten rows and middles.
    """

    parts: int
    strategy: Strategy


PLAIN = Choice(1, Strategy.NONE)


def quickest(methods: Sequence[Method], seconds: Callable[[Method], float]) -> Method:
    """Return the fastest method by medians; one with more work has to be faster by `MORE`.

    Args:
        methods: at least one, ordered by increasing work.
        seconds: runs a method once, and returns its time.
    """
    times: dict[Method, list[float]] = {one: [] for one in methods}
    for number in range(ROUNDS if len(methods) > 1 else 0):
        # Another order each round: a run can slow the next one.
        for one in random.Random(number).sample(methods, len(methods)):
            times[one].append(seconds(one))
    best = methods[0]
    for one in methods[1:]:
        if median(times[one]) < MORE * median(times[best]):
            best = one
    return best


class Chooser:
    """Chooses once for all sizes within a factor of two; all ranks choose the same.

    Args:
        limit: bytes that the pipeline may use (`dynoffload.moe.parallel.memory`); None: no limit.
        numbers: of parts, allowed.
        strategies: allowed, ordered by increasing work.
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
            shape: of the batch on the rank with most tokens.
            seconds: runs a choice once on this batch, and returns the time of the slowest rank.
            offloads: whether offloading strategies are allowed, as on the CPU.

        Raises:
            ConfigError: no choice fits the limit.
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
        """Return the choices that fit the limit, ordered by increasing work."""
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
