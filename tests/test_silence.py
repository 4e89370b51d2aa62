"""The pilot is asked within its share of the time, and no more where that is worth nothing."""

from __future__ import annotations

import contextlib
import logging
import random
from itertools import islice

import pytest
import torch
from exactness import needs_pager
from torch import nn
from torch.optim import AdamW

import dynoffload
from dynoffload.experiments import zoo
from dynoffload.pilot import template
from dynoffload.pilot.pilot import Pilot
from dynoffload.runtime.migration import host_time
from dynoffload.runtime.migration.gates import DRIFT, SETTLED, STEADY, Silence
from dynoffload.runtime.migration.host_time import PLANS, SHARE, HostTime
from dynoffload.runtime.migration.steps import Step

SAID = "no prediction is better than repeating the last order"


def test_a_steady_order_silences_at_once_and_says_so_once() -> None:
    silence = Silence()
    assert [silence.observe(0.0, 1.0) for _ in range(STEADY)] == [False] * (STEADY - 1) + [True]
    assert silence.holds
    assert not any(silence.observe(None, 1.0) for _ in range(100))


@pytest.mark.parametrize(("gain", "silent"), [(0.0, True), (-0.1, True), (0.1, False)])
def test_what_is_no_better_falls_silent(gain: float, silent: bool) -> None:
    chance, held = random.Random(0), 0
    for _ in range(300):
        silence = Silence()
        for _ in range(SETTLED):
            assert not silence.holds
            silence.observe(gain + chance.uniform(-0.05, 0.05), 0.6)
        held += silence.holds
    if gain:
        assert held == 300 * silent
    else:
        assert 0.78 * 300 < held < 0.9 * 300  # all but those above one standard error: 84%


def test_steps_without_a_prediction_say_nothing_of_it() -> None:
    silence = Silence()
    for _ in range(4 * SETTLED):
        assert not silence.observe(None, 0.5)
    assert not silence.holds


def test_after_equal_steps_it_is_asked_again_as_soon_as_one_differs() -> None:
    silence = Silence()
    assert [silence.observe(0.0, 1.0) for _ in range(STEADY)] == [False] * (STEADY - 1) + [True]
    silence.observe(None, 0.9)
    assert not silence.holds
    assert not any(silence.observe(0.0, 1.0) for _ in range(STEADY))  # it was said before
    assert silence.holds


def test_it_is_asked_again_as_the_last_order_comes_to_be_wrong() -> None:
    silence = Silence()
    for _ in range(SETTLED):
        silence.observe(0.0, 0.8)
    assert silence.holds
    steps = 0
    while silence.holds:
        silence.observe(None, 0.5)
        steps += 1
    assert 1 < steps < 10
    assert 0.8 - 0.3 * (1 - 0.9**steps) < 0.8 - DRIFT


def test_what_was_wrong_before_a_steady_order_hides_no_drift() -> None:
    silence = Silence()
    silence.observe(0.0, 0.0)
    while not silence.holds:
        silence.observe(0.0, 1.0)
    for _ in range(10):
        silence.observe(None, 0.5)
    assert not silence.holds


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        monkeypatch.setattr(host_time, "perf_counter", lambda: self.now)


def test_work_that_does_not_fit_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, time = Clock(monkeypatch), HostTime()
    time.end(10.0)
    with time.of("predict"):
        clock.now += 0.06
    assert not time.affords("predict")  # 0.12 of 0.1
    assert time.affords("ask")  # of which no cost is known
    time.begin()
    clock.now += 1.0
    assert not time.affords("predict")
    clock.now += 1.01
    assert time.affords("predict")  # the running step counts
    time.end(2.01)
    assert time.affords("predict")
    assert not time.affords("predict", "predict")
    assert time.take() == (pytest.approx(0.06), 0)
    assert time.take() == (0, 0)


def test_all_that_is_spent_is_the_share_and_one_piece_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, time, chance, begun = Clock(monkeypatch), HostTime(), random.Random(0), 0
    for _ in range(2000):
        time.begin()
        at = clock.now
        clock.now += chance.expovariate(10)
        for kind, usual in (("predict", 1e-3), ("ask", 1e-2), ("consolidate", 0.1)):
            if time.affords(kind):
                begun += 1
                with time.of(kind):
                    clock.now += usual * chance.uniform(0.5, 2)
                assert time.spent_s <= SHARE * (time.ran_s + clock.now - at) + 2 * usual
        time.end(clock.now - at)
    assert begun > 100
    assert time.spent_s > 0.8 * SHARE * time.ran_s


def test_waiting_between_steps_earns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, time = Clock(monkeypatch), HostTime()
    for _ in range(3):
        clock.now += 100.0
        for _ in range(2):  # forwards
            time.begin()
            clock.now += 1.0
        time.end(102.0)
    assert time.ran_s == pytest.approx(6.0)


def test_new_plans_have_a_share_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, time = Clock(monkeypatch), HostTime()

    def plans(seconds: float) -> int:
        count = 0
        while time.affords_plan:
            with time.of("plan"):
                clock.now += seconds
            count += 1
        return count

    time.end(1.0)
    assert plans(0.2) == 1  # its cost is not known before
    assert time.take() == (0, pytest.approx(0.2))
    for _ in range(10):  # one that took long ends no others for good
        time.end(1.0)
    assert plans(0.001) > 10
    assert time.planned_s < PLANS * 11 + 0.001
    assert time.spent_s == 0


def test_all_forwards_of_a_step_count_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, time = Clock(monkeypatch), HostTime()
    with time.of("predict"):
        clock.now += 0.02
    for _ in range(3):
        assert not time.affords()
        time.begin()
        clock.now += 1.0
        time.pause()
        clock.now += 100.0  # waiting, or a forward that failed
    assert time.affords()


def test_work_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, time = Clock(monkeypatch), HostTime()
    with contextlib.suppress(ArithmeticError), time.of("predict"):
        clock.now += 1.0
        raise ArithmeticError
    assert time.spent_s == 1.0


@needs_pager
def test_a_session_of_a_steady_order_falls_silent_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_time, "SHARE", 10.0)  # these steps are short
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = AdamW(model.parameters())
    config = {"page_bytes": 4096, "min_paged_bytes": None, "step_aside": False}
    with (
        caplog.at_level(logging.INFO),
        dynoffload.offload(model, optimizer, budget=200_000, config=config) as session,
    ):
        for _ in range(3 * STEADY):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session._forecast._silence.holds
    assert caplog.text.count(SAID) == 1
    spent = session.stats["predicting_s"]
    assert spent.iloc[:STEADY].min() > 0
    assert spent.iloc[STEADY + 1 :].sum() == 0


@needs_pager
def test_a_pilot_that_cannot_learn_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here its steps have more places for blocks than it takes."""
    monkeypatch.setattr(template, "MAX_SLOTS", 3)
    monkeypatch.setattr(host_time, "SHARE", 10.0)  # these steps are short
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = AdamW(model.parameters())
    config = {"page_bytes": 4096, "min_paged_bytes": None, "step_aside": False}
    with dynoffload.offload(model, optimizer, budget=200_000, config=config) as session:
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("the pilot cannot learn from these steps") == 1
    assert session.stats["accuracy"].iloc[1:].tolist() == [1, 1, 1]  # by the last order


@needs_pager
def test_a_pilot_that_cannot_predict_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Pilot, "predict", lambda *_: 1 / 0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    config = {"page_bytes": 4096, "min_paged_bytes": None, "step_aside": False}
    with dynoffload.offload(model, AdamW(model.parameters()), budget=200_000, config=config) as one:
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
            one.optimizer.step()
    assert caplog.text.count("the pilot cannot predict these steps") == 1
    assert one.stats["accuracy"].iloc[1:].tolist() == [1, 1, 1]  # by the last order


@needs_pager
def test_a_tracker_that_fails_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_time, "SHARE", 10.0)  # these steps are short
    monkeypatch.setattr(Step, "ran", lambda *_: 1 / 0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    config = {"page_bytes": 4096, "min_paged_bytes": None, "step_aside": False}
    with dynoffload.offload(model, AdamW(model.parameters()), budget=200_000, config=config) as one:
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
            one.optimizer.step()
    assert caplog.text.count("the pilot cannot follow these steps") == 1
    assert one.stats["accuracy"].iloc[1:].tolist() == [1, 1, 1]  # by the last order


@needs_pager
def test_a_network_that_begins_without_parameters_gets_a_pilot_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_time, "SHARE", 10.0)  # these steps are short
    model = nn.Sequential()
    config = {"page_bytes": 4096, "min_paged_bytes": None, "step_aside": False}
    with dynoffload.offload(model, budget=200_000, config=config) as session:
        model(torch.ones(2, 64))
        model.append(nn.Linear(64, 64)).append(nn.Linear(64, 64))
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
        pilot = session._forecast._pilot
        assert pilot is not None
        assert [block.path for block in pilot.vocabulary.blocks] == ["0", "1"]


@needs_pager
def test_a_session_spends_a_hundredth_of_its_time_on_prediction() -> None:
    model = zoo.build("moe", "tiny-wide")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    config = {"page_bytes": 4096, "min_paged_bytes": None, "step_aside": False}
    with dynoffload.offload(model, optimizer, budget="4MiB", config=config) as session:
        for sample in islice(zoo.samples("moe", rows=1, length=6), 60):
            model(*sample.args).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        time = session._forecast.host_time
    stats = session.stats
    assert len(stats) == 60
    assert stats["predicting_s"].sum() == pytest.approx(time.spent_s)
    assert 0 < time.spent_s <= SHARE * time.ran_s + stats["predicting_s"].max()
