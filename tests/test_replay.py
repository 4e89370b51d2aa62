"""Strict replay: the first visit out of order ends the prefetch of its step, and costs the next.

The networks are real and paged; samples that run another program come at known steps, so that
every step's prefetch can be said in advance.
"""

from __future__ import annotations

import logging
import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from exactness import Loop, Twin, compare_runs, footprint_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_exact_zoo import check
from torch import Tensor, nn
from torch.optim import AdamW

from dynoffload.runtime.migration.replay import Replay, Trust

ADAMW = partial(AdamW, lr=1e-3)


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


def ordered_loss(model: nn.Module, order: list[int]) -> Tensor:
    """Return the loss of a fixed input, through the layers in ``order``."""
    x = torch.linspace(-1, 1, 2 * 64).reshape(2, 64)
    loss: Tensor = model(x, order).square().sum()
    return loss


def train(orders: list[list[int]], policy: str) -> Any:
    """Train under a third of the footprint, compare every bit, and return the session."""
    torch.manual_seed(0)
    twin = Twin(Ordered(), ADAMW)
    return compare_runs(
        twin,
        Loop(steps=len(orders)),
        orders,
        ordered_loss,
        footprint_of(twin.model) // 3,
        config={"policy": policy},
    )


A = list(range(8))
B = [0, 1, 2, 6, 5, 4, 3, 7]


def test_a_step_out_of_order_and_the_one_after_it_lose_their_prefetch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps 0 and 5 record, 4 breaks at its fourth visit; all others prefetch."""
    with caplog.at_level(logging.INFO):
        session = train([A, A, A, A, B, A, A, A], "replay")
    steps = session.log.steps
    assert [math.isnan(step.accuracy) for step in steps] == [n in (0, 5) for n in range(8)]
    assert [step.accuracy for step in steps if step.accuracy == 1] == [1.0] * 5
    assert 0 < steps[4].accuracy < 1
    prefetched = [step.prefetched_bytes for step in steps]
    assert prefetched[0] == prefetched[5] == 0, "a step that is recorded runs on demand"
    assert session._forecast.replay.breaks == 1
    assert "the next is recorded anew" in caplog.text
    assert "layers.6" in caplog.text


def test_repeating_finds_its_place_again_where_replay_gives_up() -> None:
    """That is what tells the two apart: by the last order, the broken step and the next go on."""
    orders = [A, A, A, A, B, A, A, A]
    repeat, replay = (train(orders, policy).log.steps for policy in ("repeat", "replay"))
    assert [n for n, step in enumerate(repeat) if math.isnan(step.accuracy)] == [0]
    assert [n for n, step in enumerate(replay) if math.isnan(step.accuracy)] == [0, 5]
    assert replay[5].prefetched_bytes == 0


def test_an_order_that_is_never_the_same_prefetches_every_other_step_in_vain() -> None:
    """Recorded, broken, recorded, broken: what DeepSpeed does with dynamic networks."""
    chance = random.Random(0)
    orders = [chance.sample(A, 8) for _ in range(8)]
    session = train(orders, "replay")
    assert session._forecast.replay.breaks == 4
    assert [math.isnan(step.accuracy) for step in session.log.steps] == [True, False] * 4


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.one_of(st.just(A), st.lists(st.integers(0, 7), min_size=1, max_size=10)),
        min_size=2,
        max_size=8,
    )
)
def test_no_order_changes_a_bit(orders: list[list[int]]) -> None:
    """Layers left out, repeated, in any order; every loss, weight and state is compared."""
    train(orders, "replay")


@pytest.mark.parametrize("network", ["moe", pytest.param("tree", marks=pytest.mark.slow)])
def test_the_zoo_trains_to_the_same_bits(network: str) -> None:
    """Twenty steps of real data at an eighth of the footprint."""
    session = check(network, 8, "replay")
    assert session.log.policy == "replay"
    assert session._forecast.replay.breaks > 0, "no sample ran another program"


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12))
def test_the_rule(samples: list[list[int]]) -> None:
    """A sample is prefetched up to its first visit that is not the recorded one, by the record of
    the last sample that was recorded; one that breaks leaves none."""
    replay = Replay()
    record: list[int] | None = None
    for sample in samples:
        assert replay.begin() == bool(record)
        broken = False
        for place, visit in enumerate(sample):
            ends = replay.visit(visit, "it")
            wrong = bool(record) and not broken and list(record or ())[place : place + 1] != [visit]
            assert ends == wrong
            broken = broken or wrong
        if not record:
            record = sample
        elif broken:
            assert replay.trust is Trust.BROKEN
            record = None
