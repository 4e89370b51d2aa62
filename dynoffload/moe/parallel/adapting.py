"""What joins a layer's calls to the choice of parts and strategy: agreement, profile, trials.

What it is: `Adapting`, which a layer asks before each batch. What it is not: the choice
(`dynoffload.moe.parallel.choice`). A trial is a forward and backward of the batch at hand, of
which nothing remains: neither gradients nor random numbers, nor what autograd saves. That is out of
sight of whoever looks at what the layer's own forward saves, as activation checkpointing does,
which would run the forward around the trial again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dynoffload.moe.activations import Activation
from dynoffload.moe.parallel.choice import Choice, Chooser
from dynoffload.moe.parallel.cost import Shape, shape_of
from dynoffload.moe.parallel.exchange import Exchange
from dynoffload.moe.parallel.fitting import Profile, fit
from dynoffload.moe.parallel.strategies import Strategy
from dynoffload.moe.parallel.tiers import Tier

_ROUNDS = 2  # of a trial, of which the quicker counts
_HOPELESS = 1.3  # times the best: such a trial has one round


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
        seconds: that profile and trials took.
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
        self.last = Choice(1, Strategy.NONE)
        self.chooser: Chooser | None = None
        self.seconds = 0.0
        self._batch: Batch | None = None
        self._best = float("inf")  # of the trials for one batch

    def choose(self, batch: Batch) -> Choice:
        """Return the choice for a batch; all ranks call this together, with batches of their own.

        Raises:
            ConfigError: nothing fits in the limit.
        """
        device = batch.tokens.device
        (most,) = self._exchange.largest([len(batch.tokens)], device, "sizes of batches")
        if not most:
            return self.last
        start, before = time.perf_counter(), self.chooser
        tried = before.trials if before else 0
        self._batch, self._best = batch, float("inf")
        try:
            if self.chooser is None:
                self.chooser = self._fitted(batch, int(most))
            self.last = self.chooser.choose(int(most))
        finally:
            self._batch = None
        if before is None or self.chooser.trials > tried:
            self.seconds += time.perf_counter() - start
        return self.last

    def _fitted(self, batch: Batch, most: int) -> Chooser:
        offloads = any(one.offloads for one in self._strategies) and self._limit is not None
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
        device, agreed = batch.tokens.device, float("inf")
        for _ in range(_ROUNDS):
            leaves = [
                one.detach().requires_grad_()
                for one in (batch.tokens, batch.gates, batch.up, batch.down)
            ]
            tokens, gates, up, down = leaves
            self._exchange.largest([0.0], device, "the others before a trial")
            start = time.perf_counter()
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
                out = self._run(choice, Batch(tokens, batch.chosen, gates, up, down))
                torch.autograd.grad(out, leaves, torch.zeros_like(out))
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            took = time.perf_counter() - start
            (slowest,) = self._exchange.largest([took], device, "times of a trial")
            agreed = min(agreed, slowest)
            if agreed > _HOPELESS * self._best:
                break
        self._best = min(self._best, agreed)
        return agreed


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
