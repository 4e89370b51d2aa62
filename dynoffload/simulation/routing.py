"""Which rank's tokens go to which expert, and so what each rank sends and computes.

What it is: `Routing`, counts of rows from each rank to each expert: even, drawn with a skew, or
given; and what they mean where experts lie. What it is not: a gate, or time (`cluster`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynoffload.errors import ConfigError
from dynoffload.simulation.streams import Floats


@dataclass(frozen=True)
class Spread:
    """Where experts lie: equal groups of experts, each divided over ranks side by side.

    Attributes:
        ranks: all of them.
        groups: that the experts are spread over; all of them once in each replica.
        slices: ranks that divide each expert; a row goes to all of them.

    Raises:
        ConfigError: the ranks do not hold the experts a whole number of times.
    """

    ranks: int
    groups: int
    slices: int = 1

    def __post_init__(self) -> None:
        held = self.groups * self.slices
        if self.groups < 1 or self.slices < 1 or self.ranks % held or self.ranks < held:
            raise ConfigError(
                f"{self.ranks} ranks cannot hold {self.groups} groups of experts, each on "
                f"{self.slices}, a whole number of times"
            )

    @property
    def replicas(self) -> int:
        """How many times the ranks hold all experts."""
        return self.ranks // (self.groups * self.slices)


@dataclass(frozen=True)
class Routing:
    """Rows from each rank (row) to each expert (column).

    Raises:
        ConfigError: a count is negative or not finite, or it is no matrix.
    """

    rows: Floats

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or not self.rows.size:
            raise ConfigError(f"routing has the shape {self.rows.shape}: give ranks x experts")
        if not (np.isfinite(self.rows).all() and (self.rows >= 0).all()):
            raise ConfigError("routing has counts below 0, or counts that are not finite")

    @staticmethod
    def even(ranks: int, experts: int, rows: float) -> Routing:
        """Return the routing of ``rows`` of each rank, spread evenly."""
        return Routing(np.full((ranks, experts), rows / experts))

    @staticmethod
    def drawn(
        ranks: int, experts: int, rows: int, skew: float, generator: np.random.Generator
    ) -> Routing:
        """Return a routing drawn at random.

        Args:
            ranks: where rows come from.
            experts: where they go.
            rows: of each rank.
            skew: the expert that is in favour at place k, from 1, is chosen k ** -skew times as
                often as the first, on all ranks; 0 favours none.
            generator: of the draws; it also says which experts are in favour.
        """
        favour = generator.permutation(np.arange(1, experts + 1) ** -float(skew))
        drawn = generator.multinomial(rows, favour / favour.sum(), size=ranks)
        return Routing(drawn.astype(np.float64))

    @staticmethod
    def of_counts(counts: Floats, ranks: int) -> Routing:
        """Return the routing in which each rank sends an equal part of each expert's rows."""
        counts = np.asarray(counts, dtype=np.float64)
        return Routing(np.tile(counts / ranks, (ranks, 1)))

    def part(self, parts: int) -> Routing:
        """Return the routing of one of ``parts`` equal parts of the batch."""
        return Routing(self.rows / parts)

    def received(self, spread: Spread) -> Floats:
        """Return the rows that each rank's experts get."""
        received: Floats = self._sent(spread).sum(axis=0)
        return received

    def sent(self, spread: Spread, row_bytes: float) -> Floats:
        """Return the bytes from each rank to each rank, those that stay on one included."""
        return self._sent(spread) * row_bytes

    def _sent(self, spread: Spread) -> Floats:
        ranks, experts = self.rows.shape
        if ranks != spread.ranks or experts % spread.groups:
            raise ConfigError(
                f"routing from {ranks} ranks to {experts} experts does not fit {spread.ranks} "
                f"ranks with {spread.groups} groups of experts"
            )
        groups = self.rows.reshape(ranks, spread.groups, -1).sum(axis=2)
        held = spread.groups * spread.slices
        sent = np.zeros((ranks, ranks))
        for replica in range(spread.replicas):
            own = slice(replica * held, (replica + 1) * held)
            sent[own, own] = np.repeat(groups[own], spread.slices, axis=1)
        return sent
