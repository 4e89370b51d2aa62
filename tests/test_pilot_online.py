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


def follow(learner: OnlineLearner, examples: Sequence[Example], learn: bool = False) -> None:
    """Let a learner see some steps, and learn where it is due."""
    for example in examples:
        learner.predict(example.sample)
        learner.observe(example.sample, example.blocks, example.source)
        if learn and learner.due:
            learner.learn()


def test_without_a_pilot_it_learns_one_when_due_and_comes_to_beat_the_last_order() -> None:
    vocabulary, examples = routed(260)
    learner = OnlineLearner(vocabulary)
    follow(learner, examples[: FIRST - 1])
    assert not learner.due
    follow(learner, examples[FIRST - 1 : FIRST])
    assert learner.due
    assert learner.predict(examples[0].sample) is None
    assert math.isnan(learner.standing.pilot)
    learner.learn()
    assert not learner.due
    follow(learner, examples[FIRST:], learn=True)
    assert learner.standing.pilot > 0.8
    assert learner.standing.pilot > learner.standing.last_order + 0.2


def test_it_follows_a_drift_that_the_pilot_was_not_trained_on() -> None:
    vocabulary, examples = routed(200, noise=0.05)
    pilot = fit_pilot(vocabulary, examples)
    # The network comes to route everything to its first three experts.
    _, drifted = routed(120, seed=8, noise=0.05)
    few = {b.index for b in vocabulary.blocks if b.path.rpartition(".")[2] in {"0", "1", "2"}}
    fixed = {b.index for b in vocabulary.blocks if "experts" not in b.path}
    learner = OnlineLearner(vocabulary, pilot=pilot, grow=False)
    alone, following = [], []
    for example in drifted:
        order = [b for b in range(len(vocabulary)) if b in few or b in fixed]
        prediction = learner.predict(example.sample)
        assert prediction is not None
        learner.observe(example.sample, order)
        alone.append(block_order_accuracy(pilot.predict(example.sample).blocks, order))
        following.append(block_order_accuracy(prediction.blocks, order))
    assert sum(following[20:]) / 100 > sum(alone[20:]) / 100 + 0.2


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


def test_learning_on_another_thread_does_not_stop_the_steps() -> None:
    vocabulary, examples = routed(120)
    learner = OnlineLearner(vocabulary)
    follow(learner, examples[:60])
    with ThreadPoolExecutor(1) as pool:
        learning = pool.submit(learner.learn)
        follow(learner, examples[60:])
    assert learning.result() is learner.pilot
    assert learner.predict(examples[0].sample) is not None


def test_a_drift_is_noticed_and_another_pilot_learned_from_what_runs_now() -> None:
    vocabulary, examples = routed(300, noise=0.02)
    fixed = {b.index for b in vocabulary.blocks if "experts" not in b.path}

    def turned(order: list[int]) -> list[int]:
        """Return the order of a network that routes to the expert after each of these."""
        moved = {b if b in fixed else b + 1 for b in order}
        return [b for b in range(len(vocabulary)) if b in moved or b in fixed]

    def accuracy(learner: OnlineLearner, drift: bool) -> list[float]:
        found = []
        for example in examples[150:] if drift else examples[:150]:
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
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    vocabulary, examples = routed(200, noise=0.02)
    learner = OnlineLearner(vocabulary, pilot=fit_pilot(vocabulary, examples[:150]), grow=False)
    follow(learner, examples[150:])
    follow(learner, [replace(example, blocks=[0]) for example in examples[:60]])
    assert learner.drifts >= 1
    assert not learner.due
    assert "accuracy has fallen" in caplog.text


def test_a_drift_during_the_learning_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, examples = routed(200, noise=0.02)
    learner = OnlineLearner(vocabulary)
    follow(learner, examples[:40])
    learner.learn()
    follow(learner, examples[40:])
    before = learner.drifts

    def drifting(*args: Any, **options: Any) -> Any:
        made = fit_pilot(*args, **options)
        follow(learner, [replace(example, blocks=[0]) for example in examples[:60]])
        return made

    monkeypatch.setattr("dynoffload.pilot.online.fit_pilot", drifting)
    learner.learn()
    assert learner.drifts > before
    assert learner.due  # what was learned is of steps of before


def test_a_pilot_learned_anew_does_not_stand_by_what_the_one_before_did() -> None:
    vocabulary, examples = routed(200)
    learner = OnlineLearner(vocabulary)
    follow(learner, examples[:FIRST], learn=True)
    follow(learner, examples[FIRST : 2 * FIRST])
    assert learner.standing.steps == FIRST
    learner.predict(examples[-1].sample)  # by the one before
    learner.learn()
    learner.observe(examples[-1].sample, examples[-1].blocks)
    assert learner.standing.steps == 0
    follow(learner, examples[-2:-1])
    assert learner.standing.steps == 1
