"""The number of parts and the strategy, chosen while training runs.

What it is: `Chooser`. Once for each batch size that it has not met it sets a few strategies apart,
by the cost model and what fits in memory, and tries numbers of parts for these. All ranks choose
alike: what they go by is the largest batch of all, and times of the slowest. What it is not: the
search (`dynoffload.moe.parallel.granularity`) or the model (`dynoffload.moe.parallel.cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dynoffload.errors import ConfigError
from dynoffload.moe.parallel.cost import CostModel, Shape, memory
from dynoffload.moe.parallel.granularity import NUMBERS, Granularity
from dynoffload.moe.parallel.strategies import Strategy
from dynoffload.units import format_bytes


class Choice(NamedTuple):
    """How a batch is cut.

    Attributes:
        parts: n.
        strategy: for what is overwritten.
    """

    parts: int
    strategy: Strategy


_NEAR = 1.15  # times the best prediction: such strategies are tried
_MORE = 0.97  # of the time of what does less work, below which what does more is taken
_PLAIN = Choice(1, Strategy.NONE)


class Chooser:
    """Chooses for one layer.

    Args:
        model: of the group; the same on all ranks.
        shape: of a batch of so many tokens.
        trial: of a choice; returns seconds, the same on all ranks.
        limit: bytes that the pipeline may hold (`dynoffload.moe.parallel.cost.memory`); None for
            as many as it takes.
        numbers: of parts that are tried.
        strategies: that may be taken.
    """

    def __init__(
        self,
        model: CostModel,
        shape: Callable[[int], Shape],
        trial: Callable[[Choice], float],
        *,
        limit: int | None = None,
        numbers: Sequence[int] = NUMBERS,
        strategies: Sequence[Strategy] = tuple(Strategy),
    ) -> None:
        self.model = model
        self._shape, self._trial, self._limit = shape, trial, limit
        self._numbers = tuple(numbers)
        self._searches = {
            one: Granularity(
                lambda size, parts, one=one: self._try(size, parts, one),  # type: ignore[misc]
                self._numbers,
            )
            for one in strategies
        }
        self._known: dict[int, Choice] = {}
        self._confirmations = 0

    @property
    def trials(self) -> int:
        """How many choices were tried."""
        return self._confirmations + sum(one.trials for one in self._searches.values())

    def choose(self, tokens: int) -> Choice:
        """Return the choice for a batch.

        Args:
            tokens: of the rank that has most.

        Raises:
            ConfigError: nothing fits in the limit.
        """
        if tokens not in self._known:
            self._known[tokens] = self._found(tokens)
        return self._known[tokens]

    def _found(self, tokens: int) -> Choice:
        shape = self._shape(tokens)
        predicted = {
            strategy: min(
                (
                    self.model.seconds(strategy, parts, shape)
                    for parts in self._numbers
                    if self._fits(strategy, parts, shape)
                ),
                default=None,
            )
            for strategy in self._searches
        }
        times = [one for one in predicted.values() if one is not None]
        if not times or self._limit == 0:
            least = min(memory(s, n, shape) for s in self._searches for n in self._numbers)
            raise ConfigError(
                f"memory={format_bytes(self._limit or 0)} is too little for a batch of {tokens} "
                f"tokens a rank, which takes {format_bytes(least)} at least: raise it, or make "
                "batches smaller"
            )
        best: tuple[float, Choice] | None = None
        reusing = {
            took: strategy
            for strategy, took in predicted.items()
            if took is not None and strategy.reuses
        }
        for strategy, took in predicted.items():
            if took is None:
                continue
            # What is kept is fresh memory, whose first use costs what the model does not know; so
            # one that uses memory again is tried in any case.
            near = took <= _NEAR * min(times)
            if not near and not (reusing and strategy is reusing[min(reusing)]):
                continue
            found = self._searches[strategy].find(tokens)
            if found is None or not self._fits(strategy, found.parts, shape):
                continue
            if best is None or found.rate < _MORE * best[0]:
                best = (found.rate, Choice(found.parts, strategy))
        if best is None:  # a range is wider than what fits: the model decides
            return min(
                (
                    Choice(parts, strategy)
                    for strategy in self._searches
                    for parts in self._numbers
                    if self._fits(strategy, parts, shape)
                ),
                key=lambda one: self.model.seconds(one.strategy, one.parts, shape),
            )
        return self._confirmed(best[1], tokens, shape)

    def _confirmed(self, best: Choice, tokens: int, shape: Shape) -> Choice:
        """Return the best, or one part where that is as quick: both are tried once more, as the
        quickest of many trials may have been lucky."""
        plain = _PLAIN.strategy in self._searches and 1 in self._numbers
        if best == _PLAIN or not plain or not self._fits(_PLAIN.strategy, 1, shape):
            return best
        self._confirmations += 2
        return best if self._trial(best) < _MORE * self._trial(_PLAIN) else _PLAIN

    def _fits(self, strategy: Strategy, parts: int, shape: Shape) -> bool:
        return self._limit is None or memory(strategy, parts, shape) <= self._limit

    def _try(self, size: int, parts: int, strategy: Strategy) -> float | None:
        if not self._fits(strategy, parts, self._shape(size)):
            return None
        return self._trial(Choice(parts, strategy))
