"""Which rank's tokens go to which expert, and so what each rank sends and computes.

Counts of rows, even or drawn with a skew, and what they mean where experts lie (`Spread`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynoffload.simulation.streams import Floats


@dataclass(frozen=True)
class Spread:
    """Where experts lie: equal groups of experts, each divided over ranks side by side.

    Attributes:
        ranks: all of them.
        groups: that the experts are spread over; all of them once in each replica.
        slices: ranks that divide each expert; a row goes to all of them.
    """

    ranks: int
    groups: int
    slices: int = 1


@dataclass(frozen=True)
class Routing:
    """Rows from each rank (row) to each expert (column)."""

    rows: Floats

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
        ranks, held = spread.ranks, spread.groups * spread.slices
        groups = self.rows.reshape(ranks, spread.groups, -1).sum(axis=2)
        sent = np.zeros((ranks, ranks))
        for first in range(0, ranks, held):  # the ranks that hold all experts once
            own = slice(first, first + held)
            sent[own, own] = np.repeat(groups[own], spread.slices, axis=1)
        return sent
