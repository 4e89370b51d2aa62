"""What joins a layer's calls to the choice of parts and strategy: agreement, profile, trials, laps.

What it is: `Adapting`, which a layer asks before each batch. What it is not: the choice
(`dynoffload.moe.parallel.choice`). A trial is a forward and backward of the batch at hand, of
which nothing remains: neither gradients nor random numbers, nor what autograd saves. That is out of
sight of whoever looks at what the layer's own forward saves, as activation checkpointing does,
which would run the forward around the trial again.

[Note: steps]  While a race lasts, a choice is held until all forwards that were made by it have had
their backward, or never will: a forward that is run again (activation checkpointing) has to save
what the first one saved, and one of several forwards before a backward is no step. Whether that is
so, and what the timed one took, ranks tell each other with the size of the next batch, so the same
is held on all of them; a rank whose backward does not come makes nobody wait here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dynoffload.moe.activations import Activation
from dynoffload.moe.parallel.choice import PLAIN, Choice, Chooser, Turn
from dynoffload.moe.parallel.cost import Shape, shape_of
from dynoffload.moe.parallel.exchange import Exchange
from dynoffload.moe.parallel.fitting import Profile, fit
from dynoffload.moe.parallel.laps import Lap, Laps, in_backward
from dynoffload.moe.parallel.tiers import Tier
from dynoffload.planning.strategies import Strategy


@dataclass(frozen=True, eq=False)
class Batch:
    """What a layer is about to compute.

    Attributes:
        tokens: (L, d).
        chosen: (L, k).
        gates: (L, k).
        up: (E/world, p·h, d).
        down: (E/world, d, h).
    """

    tokens: torch.Tensor
    chosen: torch.Tensor
    gates: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Adapting:
    """Chooses for one layer, batch by batch.

    Args:
        exchange: of the layer.
        activation: of its experts.
        run: computes a batch by a choice.
        tier: returns what takes offloaded parts.
        limit: see `Chooser`.
        numbers: see `Chooser`.
        strategies: see `Chooser`.

    Attributes:
        last: the choice for the last batch that was trained on.
        chooser: None before the first batch.
        seconds: that profile and trials took, beside the steps.
    """

    def __init__(
        self,
        exchange: Exchange,
        activation: Activation,
        run: Callable[[Choice, Batch], torch.Tensor],
        tier: Callable[[torch.Tensor], Tier],
        *,
        limit: int | None,
        numbers: Sequence[int],
        strategies: Sequence[Strategy],
    ) -> None:
        self._exchange, self._activation, self._run, self._tier = exchange, activation, run, tier
        self._limit, self._numbers, self._strategies = limit, numbers, strategies
        self.last = PLAIN
        self.chooser: Chooser | None = None
        self.seconds = 0.0
        self._batch: Batch | None = None
        self._laps = Laps()
        self._held: dict[int, Choice] = {}  # of sizes that still race; see [Note: steps]
        self._timed: tuple[int, Choice] | None = None

    @property
    def settled(self) -> bool:
        """Whether nothing is tried or timed any more, for the sizes of batches so far."""
        return self.chooser is not None and self.chooser.settled

    def choose(self, batch: Batch) -> tuple[Choice, Lap | None]:
        """Return the choice for a batch; all ranks call this together, with batches of their own.

        Returns:
            The choice, and what is to be told of forward and backward, if anything is.

        Raises:
            ConfigError: nothing fits in the limit.
        """
        size, waits = self._agreed(batch)
        if not size:  # no step, and nothing that could be cut
            return PLAIN, None
        choice, timed = self._held.get(size), False
        if choice is None:
            choice, timed = self._turn(batch, size)
        self.last = choice
        if size not in self._held or (waits and in_backward()):
            return choice, None
        timed = timed and not waits
        if timed:
            self._timed = (size, choice)
        return choice, self._laps.start(self._exchange, batch.tokens.device, timed=timed)

    def _agreed(self, batch: Batch) -> tuple[int, bool]:
        """Return the size of the largest batch, and whether a backward may be to come."""
        given = [float(len(batch.tokens))]
        if not self._held:
            (most,) = self._exchange.largest(given, batch.tokens.device, "sizes of batches")
            return int(most), False
        most, waits, missing, forward, backward = self._exchange.largest(
            given + self._laps.told(), batch.tokens.device, "sizes of batches, and times"
        )
        if most and not waits:
            if self.chooser and self._timed and not missing:
                self.chooser.record(*self._timed, forward + backward)
            self._held.clear()
            self._laps.clear()
            self._timed = None
        return int(most), bool(waits)

    def _turn(self, batch: Batch, size: int) -> Turn:
        start, before = time.perf_counter(), self.chooser
        tried = before.trials if before else 0
        self._batch = batch
        try:
            if self.chooser is None:
                self.chooser = self._fitted(batch, size)
            turn = self.chooser.turn(size)
        finally:
            self._batch = None
        if not self.chooser.settled_for(size):
            self._held[size] = turn.choice
        if before is None or self.chooser.trials > tried:
            self.seconds += time.perf_counter() - start
        return turn

    def _fitted(self, batch: Batch, most: int) -> Chooser:
        offloads = any(one.offloads for one in self._strategies)
        tier = self._tier(batch.tokens) if offloads else None
        profile = Profile(
            self._exchange, batch.tokens, batch.up, batch.down, self._activation, tier
        )
        k, world = batch.chosen.shape[1], self._exchange.world
        held, _, width = batch.up.shape
        hidden, size = batch.down.shape[2], batch.tokens.element_size()

        def shape(tokens: int) -> Shape:
            first = self._activation.parts
            return shape_of(tokens, k, held * world, world, width, hidden, first, size)

        pairs = shape(most).pairs
        rows = sorted({max(pairs // parts, 8) for parts in (16, 4, 2)})
        with torch.no_grad():
            model = fit(profile, self._exchange, batch.tokens, rows)
        return Chooser(
            model,
            shape,
            self._time,
            limit=self._limit,
            numbers=self._numbers,
            strategies=self._strategies,
        )

    def _time(self, choice: Choice) -> float:
        """Return what a choice takes for the batch at hand, on the slowest rank."""
        batch = self._batch
        if batch is None:
            raise AssertionError("a trial without a batch")
        device = batch.tokens.device
        leaves = [
            one.detach().requires_grad_()
            for one in (batch.tokens, batch.gates, batch.up, batch.down)
        ]
        tokens, gates, up, down = leaves
        self._exchange.largest([0.0], device, "the sign that it is at a trial")
        start = time.perf_counter()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            out = self._run(choice, Batch(tokens, batch.chosen, gates, up, down))
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        took = time.perf_counter() - start
        return self._exchange.largest([took], device, "times of a trial")[0]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
