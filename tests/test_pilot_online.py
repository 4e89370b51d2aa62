"""The online learner corrects itself, learns within a run, and knows how it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from synthetic_pilot import routed
from synthetic_pilot import vocabulary as vocabulary_of

from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.online import FIRST, OnlineLearner
from dynoffload.pilot.pilot import Pilot
from dynoffload.planning.blocks import Vocabulary


def follow(learner: OnlineLearner, examples: Sequence[Example], learn: bool = False) -> None:
    """Let a learner see some steps, and learn where it is due."""
    for example in examples:
        learner.predict(example.sample)
        learner.observe(example.sample, example.blocks, example.source)
        if learn and learner.due:
            learner.learn()


Steps = tuple[Vocabulary, list[Example]]


@pytest.fixture(scope="module")
def steps() -> Steps:
    return routed(200, noise=0.02)


@pytest.fixture(scope="module")
def pilot(steps: Steps) -> Pilot:
    """Learned from the first 120 steps."""
    return fit_pilot(steps[0], steps[1][:120])


def test_without_a_pilot_it_learns_one_when_due_and_comes_to_beat_the_last_order() -> None:
    vocabulary, examples = routed(200)
    learner = OnlineLearner(vocabulary)
    follow(learner, examples[: FIRST - 1])
    assert not learner.due
    follow(learner, examples[FIRST - 1 : FIRST])
    assert learner.due
    assert learner.predict(examples[0].sample) is None
    assert math.isnan(learner.standing.pilot)
    learner.learn()
    assert not learner.due
    follow(learner, examples[FIRST : 2 * FIRST])
    assert learner.standing.steps == FIRST
    learner.predict(examples[-1].sample)  # by the one before
    learner.learn()
    learner.observe(examples[-1].sample, examples[-1].blocks)
    assert learner.standing.steps == 0  # that of the new pilot
    follow(learner, examples[2 * FIRST :], learn=True)
    assert learner.standing.pilot > 0.8
    assert learner.standing.pilot > learner.standing.last_order + 0.2


def test_it_follows_a_drift_that_the_pilot_was_not_trained_on(steps: Steps, pilot: Pilot) -> None:
    """The network comes to route everything to its first three experts."""
    blocks = steps[0].blocks
    few = {b.index for b in blocks if b.path.rpartition(".")[2] in {"0", "1", "2"}}
    fixed = {b.index for b in blocks if "experts" not in b.path}
    order = sorted(few | fixed)
    learner = OnlineLearner(steps[0], pilot=pilot, grow=False)
    alone, following = [], []
    for example in steps[1][120:]:
        prediction = learner.predict(example.sample)
        assert prediction is not None
        learner.observe(example.sample, order)
        alone.append(block_order_accuracy(pilot.predict(example.sample).blocks, order))
        following.append(block_order_accuracy(prediction.blocks, order))
    assert sum(following[20:]) / 60 > sum(alone[20:]) / 60 + 0.2


def test_it_learns_that_a_block_goes_on_as_it_went_last() -> None:
    """A gate that holds for some steps, whatever the samples are: its last state predicts it."""
    vocabulary, examples = routed(260, codes=4, noise=0.02)
    gate = len(vocabulary)
    names = [*((b.path, b.variant) for b in vocabulary.blocks), ("gate", "")]
    held = [
        replace(example, blocks=[*example.blocks, gate] if step // 5 % 2 else example.blocks)
        for step, example in enumerate(examples)
    ]
    pilot = fit_pilot(vocabulary_of(names), held[:140])
    learner = OnlineLearner(pilot.vocabulary, pilot=pilot, grow=False)
    alone = following = last = 0
    for before, example in pairwise(held[139:]):
        prediction = learner.predict(example.sample)
        assert prediction is not None
        learner.observe(example.sample, example.blocks)
        ran = gate in example.blocks
        following += (gate in prediction.blocks) == ran
        alone += (gate in pilot.predict(example.sample).blocks) == ran
        last += (gate in before.blocks) == ran
    assert last == 96  # of 120: it turns every five steps
    assert following > alone + 15


def test_learning_on_another_thread_does_not_stop_the_steps(steps: Steps) -> None:
    learner = OnlineLearner(steps[0])
    follow(learner, steps[1][:40])
    with ThreadPoolExecutor(1) as pool:
        learning = pool.submit(learner.learn)
        follow(learner, steps[1][40:80])
    assert learning.result() is learner.pilot
    assert learner.predict(steps[1][0].sample) is not None


def test_a_drift_is_noticed_and_another_pilot_learned_from_what_runs_now(steps: Steps) -> None:
    vocabulary, examples = steps
    fixed = {b.index for b in vocabulary.blocks if "experts" not in b.path}

    def turned(order: list[int]) -> list[int]:
        """Return the order of a network that routes to the expert after each of these."""
        moved = {b if b in fixed else b + 1 for b in order}
        return [b for b in range(len(vocabulary)) if b in moved or b in fixed]

    def accuracy(learner: OnlineLearner, drift: bool) -> list[float]:
        found = []
        for example in examples[80:] if drift else examples[:80]:
            order = turned(list(example.blocks)) if drift else list(example.blocks)
            prediction = learner.predict(example.sample)
            if prediction is not None:
                found.append(block_order_accuracy(prediction.blocks, order))
            learner.observe(example.sample, order)
            if learner.due:
                learner.learn()
        return found

    learner = OnlineLearner(vocabulary)
    before = accuracy(learner, drift=False)
    pilot = learner.pilot
    after = accuracy(learner, drift=True)
    assert learner.drifts >= 1
    assert learner.pilot is not pilot
    settled = sum(before[-40:]) / 40
    assert settled > 0.8
    assert sum(after[:8]) / 8 < settled - 0.1
    assert sum(after[-40:]) / 40 > settled - 0.1


def test_a_pilot_that_drifts_and_may_not_learn_is_only_told_of(
    steps: Steps, pilot: Pilot, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    learner = OnlineLearner(steps[0], pilot=pilot, grow=False)
    follow(learner, steps[1][120:])
    follow(learner, [replace(example, blocks=[0]) for example in steps[1][:60]])
    assert learner.drifts >= 1
    assert not learner.due
    assert "accuracy has fallen" in caplog.text


def test_a_drift_during_the_learning_is_not_forgotten(
    steps: Steps, pilot: Pilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = OnlineLearner(steps[0], pilot=pilot)
    follow(learner, steps[1][120:])

    def drifting(*args: Any, **options: Any) -> Any:
        follow(learner, [replace(example, blocks=[0]) for example in steps[1][:60]])
        return pilot

    monkeypatch.setattr("dynoffload.pilot.online.fit_pilot", drifting)
    before = learner.drifts
    learner.learn()
    assert learner.drifts > before
    assert learner.due  # what was learned is of steps of before
