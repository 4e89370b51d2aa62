"""What a step of the layer takes: time by a model of three resources, and memory by counting.

What it is: `CostModel`, whose cost of a part is the largest of computing, communication and
copying, each its volume by its speed, and slower beside the others; and `memory`, the bytes that
the pipeline holds at most. What it is not: the profile that speeds come from
(`dynoffload.moe.parallel.fitting`).

Source: MPipeMoE (arXiv 2506.22175). Its volumes, of [GEMM, all-to-all, copy] in units of bHM, bM
and bM with H = 4M, are those of `work` for one expert a token and one first matrix. Beyond it, the
dispatch of the first part and the return of the last, which nothing hides, are counted, and a
middle that is computed again needs no buffer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from dynoffload.moe.parallel.computation import TILE
from dynoffload.planning.strategies import Strategy


@dataclass(frozen=True)
class Shape:
    """A batch of one rank, as the model sees it: experts and ranks have like loads.

    Attributes:
        tokens: L, of the rank that has most.
        rows: that it takes, and sends.
        pairs: of a row and an expert.
        width: d.
        hidden: h.
        first: p, columns of the first product for one of the second.
        itemsize: bytes of a number.
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
    """Return the shape of a batch whose tokens choose experts alike.

    Of k different experts of E, none is on a given rank with a chance of
    ``C(E - E/world, k) / C(E, k)``.
    """
    away = 1.0
    held = experts // world
    for number in range(k):
        away *= max(experts - held - number, 0) / (experts - number)
    rows = round(tokens * world * (1 - away))
    return Shape(tokens, rows, tokens * k, width, hidden, first, size)


class Work(NamedTuple):
    """What a pass of a batch is.

    Attributes:
        compute: multiplications and additions, in pairs.
        communication: bytes that a rank sends, those to itself included.
        copy: bytes.
    """

    compute: float
    communication: float
    copy: float


def work(strategy: Strategy, shape: Shape, *, backward: bool) -> Work:
    """Return the work of forward or backward."""
    product = float(shape.pairs * shape.hidden * shape.width)
    rows = float(shape.rows * shape.width * shape.itemsize)
    middle = float(shape.pairs * shape.first * shape.hidden * shape.itemsize)
    times = (shape.first + 1) * (2 if backward else 1)
    trips = 2
    if backward:
        times += shape.first * strategy.computes_again
        trips += strategy.sends_again
    copied = rows * strategy.offloads_rows + middle * strategy.offloads_middle
    return Work(times * product, trips * rows, copied)


@dataclass(frozen=True)
class Speed:
    """A speed that is piecewise linear in the volume.

    Attributes:
        points: volumes and the seconds that each takes, by volume; at least one.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, volume: float) -> float:
        """Return what ``volume`` takes."""
        if volume <= 0:
            return 0.0
        volumes = [one for one, _ in self.points]
        speeds = [one / max(took, 1e-9) for one, took in self.points]
        at = bisect_left(volumes, volume)
        if at == 0:  # what is smaller takes no less than its share, and its start
            return volume / speeds[0]
        if at == len(volumes):
            return volume / speeds[-1]
        share = (volume - volumes[at - 1]) / (volumes[at] - volumes[at - 1])
        return volume / (speeds[at - 1] + share * (speeds[at] - speeds[at - 1]))


@dataclass(frozen=True)
class CostModel:
    """Times of steps.

    Attributes:
        compute: of multiplications and additions.
        communication: of bytes.
        copy: of bytes.
        compute_beside: how many times as long computing takes beside the others; at least 1.
        communication_beside: likewise.
        copy_beside: likewise; and so much longer computing takes beside copies.
    """

    compute: Speed
    communication: Speed
    copy: Speed
    compute_beside: float = 1.0
    communication_beside: float = 1.0
    copy_beside: float = 1.0

    def seconds(self, strategy: Strategy, parts: int, shape: Shape) -> float:
        """Return what forward and backward take in ``parts`` parts."""
        return sum(
            self._pass(work(strategy, shape, backward=backward), parts)
            for backward in (False, True)
        )

    def _pass(self, whole: Work, parts: int) -> float:
        computed = self.compute.seconds(whole.compute / parts)
        sent = self.communication.seconds(whole.communication / parts)
        copied = self.copy.seconds(whole.copy / parts)
        # A copy takes what computing takes, too: a core, or the memory's bandwidth.
        slower = max(self.compute_beside, self.copy_beside if copied else 1.0)
        slowest = max(
            computed * slower,
            sent * self.communication_beside,
            copied * self.copy_beside,
        )
        last = max(computed, copied) * (self.copy_beside if copied else 1.0)
        return sent + (parts - 1) * slowest + last


def memory(strategy: Strategy, parts: int, shape: Shape) -> int:
    """Return the bytes that the pipeline holds at most, in backward.

    Counted are buffers, what is kept, the gradient of tokens, and tiles; not parameters, their
    gradients, the layer's own input and result, the router, or index structures.
    """
    rows = shape.rows * shape.width
    middle = shape.pairs * shape.first * shape.hidden
    tokens = shape.tokens * shape.width
    tiles = min(TILE, -(-shape.pairs // parts)) * (
        3 * shape.width + (5 * shape.first - 1) * shape.hidden
    )
    if not strategy.reuses:
        # Kept rows; gradients of results and rows of this part, of results of the next, of rows of
        # the last; what goes out and comes home.
        held = rows + middle + {1: 2, 2: 4}.get(parts, 6) * rows / parts
    else:
        away = {1: 3, 2: 5}.get(parts, 6)
        home = (1 + strategy.sends_again) + (parts > 1)
        held = (away + home) * rows / parts + middle / parts * strategy.offloads_middle
    return int((held + tokens + tiles) * shape.itemsize)
