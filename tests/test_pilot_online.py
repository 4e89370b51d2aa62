"""A pilot adapts as it observes: it follows drifts, and learns a network from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from synthetic_pilot import routed
from synthetic_pilot import vocabulary as vocabulary_of

from dynoffload.pilot.evaluate import LastOrder, block_order_accuracy, score
from dynoffload.pilot.features import Example
from dynoffload.pilot.pilot import LATER, Pilot
from dynoffload.pilot.train import learn_pilot
from dynoffload.planning.blocks import Vocabulary
from dynoffload.profiler.input_features import InputFeatures


def follow(pilot: Pilot, examples: Sequence[Example]) -> list[list[int]]:
    """Let a pilot see some steps; return what it predicted of each."""
    predicted = []
    for example in examples:
        predicted.append(pilot.predict(example.sample).blocks)
        pilot.observe(example.sample, example.blocks)
        if pilot.due:
            pilot.consolidate()
    return predicted


def accuracy(pilot: Pilot, examples: Sequence[Example]) -> list[float]:
    """Return the accuracy of each step's prediction."""
    pairs = zip(follow(pilot, examples), examples, strict=True)
    return [block_order_accuracy(blocks, example.blocks) for blocks, example in pairs]


Steps = tuple[Vocabulary, list[Example]]


@pytest.fixture(scope="module")
def steps() -> Steps:
    return routed(200, noise=0.02)


def test_from_nothing_it_comes_to_beat_the_last_order(steps: Steps) -> None:
    vocabulary, examples = steps
    found = accuracy(Pilot(vocabulary), examples)
    last = score(LastOrder(), examples).block_order_accuracy
    assert np.mean(found[8:40]) > last + 0.05
    assert np.mean(found[-40:]) > 0.95


def test_it_follows_a_drift(steps: Steps) -> None:
    """The network comes to route every token to its first three experts."""
    vocabulary, examples = steps
    fixed = {b.index for b in vocabulary.blocks if "experts" not in b.path}
    few = {b.index for b in vocabulary.blocks if b.path.rpartition(".")[2] in {"0", "1", "2"}}
    pilot = learn_pilot(vocabulary, examples[:120])
    drifted = [replace(example, blocks=sorted(few | fixed)) for example in examples[120:]]
    found = accuracy(pilot, drifted)
    assert np.mean(found[:5]) < 0.7
    assert np.mean(found[20:]) > 0.95


def test_it_learns_that_a_block_goes_on_as_it_went_last() -> None:
    """A gate that holds for some steps, whatever the samples are: its last state predicts it."""
    vocabulary, examples = routed(260, codes=4, noise=0.02)
    gate = len(vocabulary)
    names = [*((b.path, b.variant) for b in vocabulary.blocks), ("gate", "")]
    held = [
        replace(example, blocks=[*example.blocks, gate] if step // 5 % 2 else example.blocks)
        for step, example in enumerate(examples)
    ]
    pilot = Pilot(vocabulary_of(names))
    predicted = follow(pilot, held)
    pairs = zip(predicted[140:], held[140:], strict=True)
    right = sum((gate in blocks) == (gate in example.blocks) for blocks, example in pairs)
    assert right > 75  # of 120, of which 60 run the gate


def test_what_no_vocabulary_has_and_what_was_not_predicted_is_observed(steps: Steps) -> None:
    vocabulary, examples = steps
    pilot = Pilot(vocabulary)
    pilot.predict(examples[0].sample)
    pilot.observe(examples[1].sample, [-1, *examples[1].blocks, -1])
    assert pilot.tracker is None
    assert pilot.evidence.steps == 1
    ran = {vocabulary.blocks[b].path for b in examples[1].blocks}
    pairs = zip(pilot.evidence.slots, pilot.evidence.statistics[4], strict=True)
    assert {vocabulary.blocks[block].path for (block, _), last in pairs if last} == ran


def test_structure_is_learned_at_first_often_then_rarely(steps: Steps) -> None:
    pilot, at = Pilot(steps[0]), []
    for example in [*steps[1], *steps[1]]:
        pilot.observe(example.sample, example.blocks)
        if pilot.due:
            at.append(pilot.evidence.steps)
            pilot.consolidate()
    assert at == [1, 2, 4, 8, 16, 32, 64, 128, 128 + LATER, 128 + 2 * LATER]


def test_slots_that_appear_late_know_what_they_did() -> None:
    """A block comes to run twice: its second place is known from the steps that are kept."""
    vocabulary = vocabulary_of([(path, "") for path in ("a", "b", "c")])
    pilot = Pilot(vocabulary)
    for order in [[0, 1, 2]] * 4 + [[0, 0, 1, 2]] * 4:
        pilot.observe(InputFeatures({}), order)
        if pilot.due:
            pilot.consolidate()
    assert pilot.evidence.slots == ((0, 0), (0, 1), (1, 0), (2, 0))
    assert pilot.evidence.statistics[0].tolist() == [8, 4, 8, 8]
