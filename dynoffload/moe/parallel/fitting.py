"""The short profile that a cost model is made of: the experts, the group, and the tier below.

What it is: `fit`, which all ranks call together, and which returns the same model on all of them:
each time is that of the slowest. What it is not: a trial of the pipeline
(`dynoffload.moe.parallel.choice`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from dynoffload.moe.activations import Activation
from dynoffload.moe.indices import route
from dynoffload.moe.parallel import computation
from dynoffload.moe.parallel.cost import CostModel, Speed
from dynoffload.moe.parallel.dispatch import Part
from dynoffload.moe.parallel.exchange import Exchange, Pending
from dynoffload.moe.parallel.tiers import Tier

_ROUNDS = 2  # of which the quicker counts
_MOST_BESIDE = 4.0


class Profile:
    """Times of what a part is made of, on this rank.

    Args:
        exchange: of the layer.
        like: a tensor of the dtype and on the device of tokens.
        up: (E/world, p·h, d).
        down: (E/world, d, h).
        activation: between them.
        tier: below; None where nothing is ever offloaded.
    """

    def __init__(
        self,
        exchange: Exchange,
        like: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: Activation,
        tier: Tier | None,
    ) -> None:
        self._exchange, self._like, self._tier = exchange, like, tier
        self._up, self._down, self._activation = up.detach(), down.detach(), activation
        self.width = down.shape[1]
        self.product = (up.shape[1] + down.shape[2]) * self.width  # of a row, in pairs

    def part(self, rows: int) -> Part:
        """Return a part whose rows go to this rank's experts in turn."""
        chosen = torch.arange(rows, device=self._like.device).unsqueeze(1) % len(self._up)
        ones = self._like.new_ones(rows)
        index = torch.arange(rows, device=self._like.device)
        return Part(index, (rows,), (rows,), route(chosen, len(self._up)), ones, index)

    def compute(self, rows: int) -> Callable[[], None]:
        """Return the forward of such a part."""
        part, given = self.part(rows), self._like.new_zeros(rows, self.width)
        out = torch.empty_like(given)

        def act() -> None:
            computation.forward(part, given, self._up, self._down, None, out, self._activation)
            self._end()

        return act

    def travel(self, rows: int) -> Callable[[], Pending]:
        """Return an all-to-all of as many rows as a multiple of ranks allows."""
        world = self._exchange.world
        shares = [max(rows // world, 1)] * world
        given = self._like.new_zeros(sum(shares), self.width)
        into = torch.empty_like(given)
        return lambda: self._exchange.start(into, given, shares, shares, "a profile's rows")

    def alone(self, act: Callable[[], object]) -> float:
        """Return the seconds of the quicker of two runs."""
        took = []
        for _ in range(_ROUNDS):
            self._exchange.largest([0.0], self._like.device, "the others before a profile")
            start = time.perf_counter()
            act()
            took.append(time.perf_counter() - start)
        return min(took)

    def copied(self, rows: int) -> Callable[[], None]:
        """Return a copy below of such rows."""
        given = self._like.new_zeros(rows, self.width)

        def act() -> None:
            if self._tier is not None:
                self._tier.store(given).wait()
                self._end()

        return act

    def beside(self, rows: int, computing: float, travelling: float) -> list[float]:
        """Return how many times as long computing and an all-to-all take beside each other.

        Args:
            rows: of both.
            computing: seconds alone, the same on all ranks.
            travelling: likewise.
        """
        act, start = self.compute(rows), self.travel(rows)
        act()
        rounds = max(1, min(50, round(travelling / max(computing, 1e-6))))
        trips = max(1, min(50, round(computing / max(travelling, 1e-6))))
        self._exchange.largest([0.0], self._like.device, "the others before a profile")
        began = time.perf_counter()
        waiting = [start() for _ in range(trips)]
        for _ in range(rounds):
            act()
        computed = time.perf_counter() - began
        for one in waiting:
            one.wait()
        self._end()
        travelled = time.perf_counter() - began
        return [
            _clamped(computed / (rounds * computing)),
            _clamped(travelled / max(trips * travelling, computed)),
        ]

    def beside_copies(self, rows: int, computing: float, copying: float) -> float:
        """Return how many times as long both take beside each other as the longer takes alone.

        Args:
            rows: of both.
            computing: seconds alone.
            copying: likewise.
        """
        if self._tier is None:
            return 1.0
        act, given = self.compute(rows), self._like.new_zeros(rows, self.width)
        rounds = max(1, min(50, round(copying / max(computing, 1e-6))))
        copies = max(1, min(50, round(computing / max(copying, 1e-6))))
        began = time.perf_counter()
        stored = [self._tier.store(given) for _ in range(copies)]
        for _ in range(rounds):
            act()
        for one in stored:
            one.wait()
        self._end()
        took = time.perf_counter() - began
        return _clamped(took / max(rounds * computing, copies * copying))

    def _end(self) -> None:
        if self._like.device.type != "cpu":
            torch.accelerator.synchronize(self._like.device)


def _clamped(ratio: float) -> float:
    return min(max(ratio, 1.0), _MOST_BESIDE)


def fit(profile: Profile, exchange: Exchange, like: torch.Tensor, rows: Sequence[int]) -> CostModel:
    """Return the cost model of the group; all ranks call this together.

    Args:
        profile: of this rank.
        exchange: of the layer.
        like: says dtype and device.
        rows: of parts that are timed, in order, at least one.
    """
    found: list[float] = []
    for count in rows:
        travel = profile.travel(count)
        found += [
            profile.alone(profile.compute(count)),
            profile.alone(lambda travel=travel: travel().wait()),  # type: ignore[misc]
            profile.alone(profile.copied(count)),
        ]
    agreed = exchange.largest(found, like.device, "times of a profile")
    number = len(rows) // 2
    computing, travelling, copying = agreed[3 * number : 3 * number + 3]
    ratios = profile.beside(rows[number], computing, travelling)
    ratios.append(profile.beside_copies(rows[number], computing, copying))
    ratios = exchange.largest(ratios, like.device, "times of a profile beside each other")
    width = profile.width
    product = profile.product
    volumes = [(count * product, count * width * like.element_size()) for count in rows]

    def speed(resource: int) -> Speed:
        which = 0 if resource == 0 else 1
        return Speed(
            tuple(
                (float(volume[which]), agreed[3 * number + resource])
                for number, volume in enumerate(volumes)
            )
        )

    return CostModel(speed(0), speed(1), speed(2), *ratios)
