"""Chooses the number of parts and the strategy while training runs, by times of its steps.

[Note: steps]  While a race lasts, a choice is held until every forward made by it has had its
backward, or never will. A forward that is run again (activation checkpointing) has to save what the
first one saved, and one of several forwards before a backward is no step. Ranks exchange whether
that is so, with the time of the last step and the size of the next batch, so all hold the same. A
rank whose backward does not come makes nobody wait here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dynoffload.errors import ConfigError
from dynoffload.moe.parallel.exchange import Exchange
from dynoffload.moe.parallel.memory import Shape, memory
from dynoffload.moe.parallel.race import ROUNDS, Race
from dynoffload.moe.parallel.step_timer import StepTimer, TimedStep, in_backward
from dynoffload.planning.strategies import Strategy
from dynoffload.units import format_bytes

NUMBERS = (1, 2, 4, 8, 16)
"""Of parts, of which ``"auto"`` chooses."""

_FIRST_ROUNDS = ROUNDS  # of the race of numbers


class Choice(NamedTuple):
    """How a batch is cut.

    Attributes:
        parts: n.
        strategy: for what is overwritten.
    """

    parts: int
    strategy: Strategy


PLAIN = Choice(1, Strategy.NONE)


class Chooser:
    """Chooses by two races for each size: of numbers of parts, then of strategies.

    Numbers race with the strategy of least work that fits in the limit; then all strategies race
    with the number that has won. All ranks choose alike, as they record the same times.

    Args:
        shape: of a batch of so many tokens.
        limit: bytes that the pipeline may hold (`dynoffload.moe.parallel.memory`); None for as
            many as it takes.
        numbers: of parts that may be taken.
        strategies: that may be taken, those of less work first.
    """

    def __init__(
        self,
        shape: Callable[[int], Shape],
        *,
        limit: int | None = None,
        numbers: Sequence[int] = NUMBERS,
        strategies: Sequence[Strategy] = tuple(Strategy),
    ) -> None:
        self._shape, self._limit = shape, limit
        self._all = [Choice(parts, strategy) for strategy in strategies for parts in numbers]
        self._races: dict[int, list[Race[Choice]]] = {}

    @property
    def timed_steps(self) -> int:
        """How many steps have raced."""
        return sum(race.timed_steps for races in self._races.values() for race in races)

    @property
    def settled(self) -> bool:
        """Whether the choice stands for all sizes so far."""
        return all(len(races) == 2 and races[1].settled for races in self._races.values())

    def turn(self, tokens: int) -> tuple[Choice, bool]:
        """Return the choice for a step, and whether its time is to be recorded.

        Args:
            tokens: of the rank that has most.

        Raises:
            ConfigError: nothing fits in the limit.
        """
        fitting, races = self._fitting(tokens), self._races_of(tokens)
        turn = races[-1].turn(fitting.__contains__)
        if turn is not None:
            return turn, True
        for race in reversed(races):
            best = race.best(fitting.__contains__)
            if best is not None:
                return best, False
        return fitting[0], False  # sizes of one race, of which not all fit alike

    def record(self, tokens: int, choice: Choice, seconds: float) -> None:
        """Take the time of a step, of the slowest rank."""
        self._races_of(tokens)[-1].record(choice, seconds / tokens)

    def settled_for(self, tokens: int) -> bool:
        """Whether batches of this size are made in the same way from now on."""
        races = self._races_of(tokens)
        return len(races) == 2 and races[1].settled

    def _races_of(self, tokens: int) -> list[Race[Choice]]:
        # Sizes within a factor of two share races, so that those of every step can be others.
        upto = 1 << (tokens - 1).bit_length()
        if upto not in self._races:
            lightest: dict[int, Choice] = {}
            for one in self._fitting(tokens):
                lightest.setdefault(one.parts, one)
            self._races[upto] = [Race(list(lightest.values()), _FIRST_ROUNDS)]
        races = self._races[upto]
        if len(races) == 1 and races[0].settled:
            best = races[0].best()
            races.append(Race([one for one in self._all if best and one.parts == best.parts]))
        return races

    def _fitting(self, tokens: int) -> list[Choice]:
        """Return what fits in the limit, what does less work first."""
        shape = self._shape(tokens)
        needs = {one: memory(one.strategy, one.parts, shape) for one in self._all}
        if self._limit is None:
            return self._all
        found = [one for one in self._all if needs[one] <= self._limit]
        if not found:
            raise ConfigError(
                f"memory={format_bytes(self._limit)} is too little for a batch of {tokens} tokens "
                f"a rank, which takes {format_bytes(min(needs.values()))} at least: raise it, or "
                "make batches smaller"
            )
        return found


class Adapting:
    """Chooses for one layer, batch by batch; all ranks do so together.

    Args:
        exchange: of the layer.
        shape: of a batch of so many tokens, of numbers of so many bytes.
        limit: see `Chooser`.
        numbers: see `Chooser`.
        strategies: see `Chooser`.

    Attributes:
        last: the choice for the last batch that was trained on.
        chooser: None before the first batch.
    """

    def __init__(
        self,
        exchange: Exchange,
        shape: Callable[[int, int], Shape],
        *,
        limit: int | None,
        numbers: Sequence[int],
        strategies: Sequence[Strategy],
    ) -> None:
        self._exchange, self._shape = exchange, shape
        self._limit, self._numbers, self._strategies = limit, numbers, strategies
        self.last = PLAIN
        self.chooser: Chooser | None = None
        self._timer = StepTimer()
        self._held: dict[int, Choice] = {}  # of sizes that still race; see [Note: steps]
        self._timed: tuple[int, Choice] | None = None

    @property
    def settled(self) -> bool:
        """Whether nothing is timed any more, for the sizes of batches so far."""
        return self.chooser is not None and self.chooser.settled

    def choose(self, tokens: torch.Tensor) -> tuple[Choice, TimedStep | None]:
        """Return the choice for a batch of this rank, (L, d).

        Returns:
            The choice, and what times forward and backward, if anything does.

        Raises:
            ConfigError: nothing fits in the limit.
        """
        size, waits = self._agreed(tokens)
        if not size:  # no step, and nothing that could be cut
            return PLAIN, None
        choice, timed = self._held.get(size), False
        if choice is None:
            if self.chooser is None:
                itemsize, on_cpu = tokens.element_size(), tokens.device.type == "cpu"
                serve = [one for one in self._strategies if on_cpu or not one.offloads]
                self.chooser = Chooser(
                    lambda count: self._shape(count, itemsize),
                    limit=self._limit,
                    numbers=self._numbers,
                    strategies=serve or self._strategies,
                )
            choice, timed = self.chooser.turn(size)
            if not self.chooser.settled_for(size):
                self._held[size] = choice
        self.last = choice
        if size not in self._held or (waits and in_backward()):
            return choice, None
        timed = timed and not waits
        if timed:
            self._timed = (size, choice)
        return choice, self._timer.start(self._exchange, tokens.device, timed=timed)

    def _agreed(self, tokens: torch.Tensor) -> tuple[int, bool]:
        """Return the size of the largest batch, and whether a backward may be to come."""
        given = [float(len(tokens))]
        if not self._held:
            (most,) = self._exchange.largest(given, tokens.device, "sizes of batches")
            return int(most), False
        most, waits, missing, forward, backward = self._exchange.largest(
            given + self._timer.state(), tokens.device, "sizes of batches, and times"
        )
        if most and not waits:
            if self.chooser and self._timed and not missing:
                self.chooser.record(*self._timed, forward + backward)
            self._held.clear()
            self._timer.clear()
            self._timed = None
        return int(most), bool(waits)
