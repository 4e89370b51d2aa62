"""The number of parts and the strategy, chosen while training runs.

What it is: `Chooser`. For batch sizes that it has not met it searches a number of parts by trying,
guesses from that and the cost model what may be the quickest, and lets these race in the steps that
follow. All ranks choose alike: what they go by is the largest batch of all, and times of the
slowest. What it is not: the search (`dynoffload.moe.parallel.granularity`), the race
(`dynoffload.moe.parallel.race`) or the model (`dynoffload.moe.parallel.cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dynoffload.errors import ConfigError
from dynoffload.moe.parallel.cost import CostModel, Shape, memory
from dynoffload.moe.parallel.granularity import NUMBERS, Granularity
from dynoffload.moe.parallel.race import Race
from dynoffload.planning.strategies import Strategy
from dynoffload.units import format_bytes


class Choice(NamedTuple):
    """How a batch is cut.

    Attributes:
        parts: n.
        strategy: for what is overwritten.
    """

    parts: int
    strategy: Strategy


class Turn(NamedTuple):
    """How a step is made.

    Attributes:
        choice: taken.
        timed: its time is asked for.
    """

    choice: Choice
    timed: bool


PLAIN = Choice(1, Strategy.NONE)

_NEAR = 1.5  # times the best guess: such choices race, as guesses are rough
_MOST = 8  # that race, beside `PLAIN`


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
        self._all = [Choice(parts, strategy) for strategy in strategies for parts in numbers]
        self._numbers = tuple(numbers)
        self._searches: dict[Strategy, Granularity] = {}
        self._races: dict[int, Race[Choice]] = {}

    @property
    def trials(self) -> int:
        """How many choices were tried, beside the steps."""
        return sum(one.trials for one in self._searches.values())

    @property
    def laps(self) -> int:
        """How many steps were timed."""
        return sum(one.laps for one in self._races.values())

    @property
    def settled(self) -> bool:
        """Whether no race is under way."""
        return all(one.settled for one in self._races.values())

    def turn(self, tokens: int) -> Turn:
        """Return how to make a step.

        Args:
            tokens: of the rank that has most.

        Raises:
            ConfigError: nothing fits in the limit.
        """
        race = self._race(tokens)
        fits = self._fitting(tokens)
        runs = race.turn(fits)
        if runs is not None:
            return Turn(runs, timed=True)
        best = race.best(fits)
        if best is None:  # a race is of sizes of which not all fit alike: the model decides
            predicted = self._predicted(tokens)
            best = min(predicted, key=lambda one: predicted[one])
        return Turn(best, timed=False)

    def record(self, tokens: int, choice: Choice, seconds: float) -> None:
        """Tell the time of a step, of the slowest rank."""
        self._race(tokens).record(choice, seconds / tokens)

    def settled_for(self, tokens: int) -> bool:
        """Whether batches of this size are made in the same way from now on."""
        return self._race(tokens).settled

    def _race(self, tokens: int) -> Race[Choice]:
        # Sizes within a factor of two share a race, so that those of every step can be others.
        upto = 1 << (tokens - 1).bit_length()
        if upto not in self._races:
            self._races[upto] = Race(self._leaders(tokens, upto))
        return self._races[upto]

    def _fitting(self, tokens: int) -> Callable[[Choice], bool]:
        shape = self._shape(tokens)
        return lambda one: (
            self._limit is None or memory(one.strategy, one.parts, shape) <= self._limit
        )

    def _predicted(self, tokens: int) -> dict[Choice, float]:
        """Return what the model says of all that fits."""
        shape, fits = self._shape(tokens), self._fitting(tokens)
        found = {
            one: self.model.seconds(one.strategy, one.parts, shape)
            for one in self._all
            if fits(one)
        }
        if not found or self._limit == 0:
            least = min(memory(one.strategy, one.parts, shape) for one in self._all)
            raise ConfigError(
                f"memory={format_bytes(self._limit or 0)} is too little for a batch of {tokens} "
                f"tokens a rank, which takes {format_bytes(least)} at least: raise it, or make "
                "batches smaller"
            )
        return found

    def _leaders(self, tokens: int, upto: int) -> list[Choice]:
        """Return what may be the quickest, what does less work first."""
        predicted = self._predicted(tokens)
        guesses = self._guesses(predicted, upto)
        ranked = sorted(guesses, key=lambda one: guesses[one])
        # Of each strategy the best number in any case: how copies and products slow each other, and
        # what fresh memory costs, the model knows least. What is far behind has two turns.
        leaders = {
            next(one for one in ranked if one.strategy is strategy)
            for strategy in {one.strategy for one in ranked}
        }
        for one in ranked:
            if len(leaders) < _MOST and guesses[one] <= _NEAR * guesses[ranked[0]]:
                leaders.add(one)
        leaders |= {PLAIN} & predicted.keys()
        return [one for one in self._all if one in leaders]

    def _guesses(self, predicted: dict[Choice, float], upto: int) -> dict[Choice, float]:
        """Return guesses of seconds: the model, set right by trials of the numbers of parts.

        Trials are made of the strategy that the model puts first. A number that was not tried is as
        far from the model as the nearest one that was.
        """
        lead = min(predicted, key=lambda one: predicted[one]).strategy
        tried: dict[int, float] = {}

        def trial(_: int, parts: int) -> float | None:
            one = Choice(parts, lead)
            if one not in predicted:
                return None
            took = self._trial(one)
            tried[parts] = took / predicted[one]
            return took

        search = self._searches.setdefault(lead, Granularity(self._numbers))
        found = search.find(upto, trial)
        if not tried:  # a known range: its number and those beside it
            near = found.parts if found else self._numbers[0]
            kept = {one: took for one, took in predicted.items() if _apart(one.parts, near) <= 2}
            return kept or predicted
        return {
            one: took * tried[min(tried, key=lambda parts: (_apart(parts, one.parts), parts))]
            for one, took in predicted.items()
        }


def _apart(one: int, other: int) -> float:
    return max(one, other) / min(one, other)
