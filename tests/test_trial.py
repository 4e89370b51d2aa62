"""Prefetch goes on while it pays, and off when on-demand waits less."""

from __future__ import annotations

import logging
import math
import random

import numpy as np
import pytest
import torch
from exactness import LyingPilot, Twin, footprint_of, needs_pager, small, small_loss, small_samples
from torch import Tensor, nn
from torch.optim import AdamW

from dynoffload.runtime.migration.gates import (
    GROWTH,
    SETTLING,
    TRIED,
    WATCHED,
    Trial,
    likely,
)
from dynoffload.telemetry import StepStats

SAMPLES = small_samples(40, seed=1)


def step(stall: float, wasted: int = 0) -> StepStats:
    """Return a step of one second of work."""
    return StepStats(0, 1.0 + stall, 1, stall, 0, 0, 100, 100 - wasted, wasted, 0.0, 0)


def run(trial: Trial, with_prefetch: StepStats, on_demand: StepStats, steps: int) -> list[bool]:
    """Return for each step whether it prefetched."""
    modes = []
    for _ in range(steps):
        modes.append(trial.prefetch)
        trial.observe(with_prefetch if trial.prefetch else on_demand)
    return modes


@pytest.mark.parametrize("bad", [step(0.5), step(0.01, wasted=80)], ids=["waits", "wastes"])
def test_what_loses_goes_off_for_good_and_says_so_once(
    bad: StepStats, caplog: pytest.LogCaptureFixture
) -> None:
    trial = Trial("the moon")
    with caplog.at_level(logging.WARNING):
        modes = run(trial, bad, step(0.005), 200)
    on = SETTLING + WATCHED
    assert modes == [True] * on + [False] * (200 - on)
    assert trial.lost
    assert len(caplog.records) == 1
    assert "the moon" in caplog.text


def test_what_wins_goes_on_and_is_tried_less_and_less_often() -> None:
    trial = Trial("x")
    modes = run(trial, step(0.5), step(0.9), 1000)
    assert not trial.lost
    assert modes.count(False) == 4 * (SETTLING + TRIED)
    assert modes[SETTLING + WATCHED] is False
    after = 2 * SETTLING + WATCHED + TRIED
    assert all(modes[after : after + SETTLING + GROWTH * WATCHED])


def test_what_stalls_far_less_than_steps_on_demand_is_not_tried() -> None:
    for on_demand, tried in ((1.5, False), (0.6, True), (math.nan, True)):
        trial = Trial("x")
        for _ in range(SETTLING + WATCHED):
            assert trial.prefetch
            known = trial.observe(step(0.5), on_demand)
            assert known is on_demand
        assert trial.prefetch == (not tried)
    for _ in range(SETTLING + TRIED):
        known = trial.observe(step(0.9), on_demand)
    assert known == pytest.approx(0.9)


def test_only_what_is_likely_enough_is_fetched_ahead() -> None:
    order = [0, 1, 2, 3]
    assert likely(order, np.array([1.0, 0.74, 0.76, 0.99], np.float32)) == [0, 2, 3]
    assert likely(order, None) == order


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Return the loss of a step."""
    torch.manual_seed(number)
    return small_loss(model, SAMPLES[number])


@needs_pager
@pytest.mark.timeout(60)
def test_a_prediction_that_loses_goes_off_in_a_session(caplog: pytest.LogCaptureFixture) -> None:
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    budget = footprint_of(twin.model) // 3
    chance = random.Random(0)
    liar = LyingPilot(twin.model, [[chance.randrange(20) for _ in range(3)] for _ in range(30)])
    with caplog.at_level(logging.WARNING), twin.paged(budget, pilot=liar) as session:
        # The steps are so short that time decides nothing: say what waiting each kind costs.
        trial = session._forecast._trials["the pilot"] = Trial("the pilot")
        observe = trial.observe
        trial.observe = lambda *_: observe(step(0.5 if trial.prefetch else 0.1))  # type: ignore
        twin.train(loss_of, range(30))
        prefetched = [one.prefetched_bytes for one in session.log.steps]
    on = SETTLING + WATCHED
    assert sum(prefetched[:on]) > 0
    assert sum(prefetched[on + 1 :]) == 0
    assert caplog.text.count("prefetch is off from now") == 1
    twin.assert_same()
