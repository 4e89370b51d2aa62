"""The baseline strict replay: the first visit out of order ends the prefetch of its step.

The networks are real and paged; samples that run another program come at known steps, so that
every step's prefetch can be said in advance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from exactness import SMALL_PAGES, Twin, assert_same, footprint_of
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.experiments.baselines.replay import replaying
from dynoffload.experiments.ways import REPLAY


class Ordered(nn.Module):
    """Runs its layers in the order that its input names."""

    def __init__(self, layers: int = 8, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        """Return ``[rows, width]`` for the same."""
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def steps(model: nn.Module, optimizer: Optimizer, orders: list[list[int]]) -> list[Tensor]:
    """Make a step for each of ``orders`` and return the losses."""
    losses = []
    for order in orders:
        x = torch.linspace(-1, 1, 2 * 64).reshape(2, 64)
        loss = model(x, order).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def train(orders: list[list[int]], policy: str = REPLAY) -> Any:
    """Train under a third of the footprint, compare every bit, and return the session."""
    torch.manual_seed(0)
    twin = Twin(Ordered(), lambda parameters: AdamW(parameters, lr=1e-3))
    expected = steps(twin.reference, twin.its, orders)
    budget, config = footprint_of(twin.model) // 3, SMALL_PAGES
    block = (
        replaying(twin.model, twin.optimizer, budget, None, **config)
        if policy == REPLAY
        else dynoffload.offload(
            twin.model, twin.optimizer, budget=budget, config={**config, "policy": policy}
        )
    )
    with block as session:
        assert_same(steps(twin.model, twin.optimizer, orders), expected, "losses")
    twin.assert_same()
    return session


A = list(range(8))
B = [0, 1, 2, 6, 5, 4, 3, 7]


def test_a_step_out_of_order_and_the_one_after_it_lose_their_prefetch() -> None:
    """Steps 0 and 5 record, 4 breaks at its fourth visit; all others prefetch. By the last order,
    the broken step and the next go on."""
    orders = [A, A, A, A, B, A, A, A]
    session = train(orders)
    replay = session.log.steps
    assert [math.isnan(step.accuracy) for step in replay] == [n in (0, 5) for n in range(8)]
    assert [step.accuracy for step in replay if step.accuracy == 1] == [1.0] * 5
    assert 0 < replay[4].accuracy < 1
    assert replay[0].prefetched_bytes == replay[5].prefetched_bytes == 0
    assert session._forecast.breaks == 1
    repeat = train(orders, "repeat").log.steps
    assert [n for n, step in enumerate(repeat) if math.isnan(step.accuracy)] == [0]
    assert replay[3].prefetched_bytes > 0


def test_a_sample_that_ends_early_leaves_the_record() -> None:
    session = train([A, A[:4], A, A])  # and no bit changes
    assert session._forecast.breaks == 0
    assert [math.isnan(step.accuracy) for step in session.log.steps] == [True] + [False] * 3
