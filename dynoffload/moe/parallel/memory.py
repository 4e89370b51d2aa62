"""Estimates the peak bytes of a layer's pipeline by counting; source: MPipeMoE (arXiv
2506.22175)."""

from __future__ import annotations

from dataclasses import dataclass

from dynoffload.moe.parallel.computation import TILE
from dynoffload.moe.parallel.strategies import Strategy


@dataclass(frozen=True)
class Shape:
    """Sizes of one rank's batch, assuming balanced loads of experts and ranks.

    Attributes:
        tokens: L, of the rank with most.
        rows: number that it receives, and sends.
        pairs: number of (row, expert) pairs.
        width: d.
        hidden: h.
        first: p, columns of the first product for each of the second.
        itemsize: bytes per element.
    """

    tokens: int
    rows: int
    pairs: int
    width: int
    hidden: int
    first: int
    itemsize: int


def shape_of(
    tokens: int, k: int, experts: int, world: int, width: int, hidden: int, first: int, size: int
) -> Shape:
    """Return the sizes of a batch whose tokens choose experts uniformly.

    The probability that none of k different experts of E is on a given rank is
    ``C(E - E/world, k) / C(E, k)``.
    """
    away = 1.0
    held = experts // world
    for number in range(k):
        away *= max(experts - held - number, 0) / (experts - number)
    rows = round(tokens * world * (1 - away))
    return Shape(tokens, rows, tokens * k, width, hidden, first, size)


def memory(strategy: Strategy, parts: int, shape: Shape) -> int:
    """Return the peak bytes of the pipeline, which occur in backward.

    Included are buffers, saved tensors, the gradient of tokens, and tiles; not parameters, their
    gradients, the layer's own input and result, the router, or index structures.
    """
    rows = shape.rows * shape.width
    middle = shape.pairs * shape.first * shape.hidden
    tokens = shape.tokens * shape.width
    tiles = min(TILE, -(-shape.pairs // parts)) * (
        3 * shape.width + (5 * shape.first - 1) * shape.hidden
    )
    if not strategy.reuses:
        # Saved rows; gradients of results and rows of this part, of results of the next, of rows of
        # the previous; send and receive buffers.
        held = rows + middle + {1: 2, 2: 4}.get(parts, 6) * rows / parts
    else:
        away = {1: 3, 2: 5}.get(parts, 6)
        again = strategy.sends_again
        home = {1: 0, 2: 1 + again}.get(parts, 2 + again)
        held = (away + home) * rows / parts + middle / parts * strategy.offloads_middle
    return int((held + tokens + tiles) * shape.itemsize)
