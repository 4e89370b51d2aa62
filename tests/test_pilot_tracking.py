"""A step is followed block by block, and the rest predicted from what ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_pilot import routed, trees, vocabulary

from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.tracking import StepTracker
from dynoffload.profiler.input_features import InputFeatures

LAYERS, EXPERTS = 4, 3


def echoes(count: int, seed: int = 0) -> tuple[object, list[Example]]:
    """Return steps of which nothing is to be seen before: one expert is drawn, and every layer
    runs the same."""
    rng = np.random.default_rng(seed)
    names = [("embedding", "")]
    for layer in range(LAYERS):
        names.append((f"layers.{layer}.attention", ""))
        names += [(f"layers.{layer}.experts.{expert}", "") for expert in range(EXPERTS)]
    names.append(("head", ""))
    number = {path: i for i, (path, _) in enumerate(names)}
    examples = []
    for step in range(count):
        expert = int(rng.integers(EXPERTS))
        order = [number["embedding"]]
        for layer in range(LAYERS):
            order += [
                number[f"layers.{layer}.attention"],
                number[f"layers.{layer}.experts.{expert}"],
            ]
        examples.append(Example(InputFeatures({}), [*order, number["head"]], f"f{step % 6}"))
    return vocabulary(names), examples


def test_one_layer_tells_the_others(tmp_path: Path) -> None:
    known, examples = echoes(240)
    fit_pilot(known, examples).save(tmp_path / "x.pilot")
    pilot = Pilot.load(tmp_path / "x.pilot")
    for example in echoes(12, seed=3)[1]:
        step = StepTracker(pilot, example.sample)
        for block in example.blocks[:4]:  # embedding, attention, expert, attention
            step.observe(block)
        assert step.decided
        assert step.remaining() == list(example.blocks[4:])
        assert not step.decided
        for place in range(4, len(example.blocks)):
            step.observe(example.blocks[place])
            assert step.remaining() == list(example.blocks[place + 1 :])


@pytest.fixture(scope="module")
def experts() -> tuple[Pilot, list[Example]]:
    known, examples = routed(120, noise=0.1)
    return fit_pilot(known, examples), examples


@pytest.fixture(scope="module")
def cells() -> Pilot:
    return fit_pilot(*trees(60))


def test_what_went_by_without_running_is_known_not_to_run(
    experts: tuple[Pilot, list[Example]],
) -> None:
    pilot, examples = experts
    known = pilot.vocabulary
    number = {block.path: block.index for block in known.blocks}
    step = StepTracker(pilot, examples[0].sample)
    step.observe(number["embedding"])
    step.observe(number["layers.0.attention"])
    step.observe(number["layers.0.experts.3"])
    rest = step.remaining()
    gone = {number[f"layers.0.experts.{e}"] for e in range(4)}
    assert not gone & set(rest)
    step.observe(number["layers.1.attention"])
    assert not {number[f"layers.0.experts.{e}"] for e in range(12)} & set(step.remaining())


def test_a_loop_goes_on_as_its_elements_say_until_a_stranger_runs(cells: Pilot) -> None:
    example = trees(5, seed=4)[1][2]
    step = StepTracker(cells, example.sample)
    for place, block in enumerate(example.blocks):
        step.observe(block)
        assert not step.decided
        assert step.remaining() == list(example.blocks[place + 1 :])
    step = StepTracker(cells, example.sample)
    for block in example.blocks[:3]:
        step.observe(block)
    step.observe(-1)
    assert step.decided
    step.observe(example.blocks[3])
    assert step.remaining() == [1]


def test_strangers_and_blocks_out_of_order_do_no_harm(
    experts: tuple[Pilot, list[Example]],
) -> None:
    pilot, examples = experts
    known = pilot.vocabulary
    rng = np.random.default_rng(0)
    for _ in range(20):
        step = StepTracker(pilot, examples[int(rng.integers(120))].sample)
        for block in rng.integers(-1, len(known), size=60).tolist():
            step.observe(block)
            rest = step.remaining()
            assert all(0 <= b < len(known) for b in rest)
            assert ((step.chances >= 0) & (step.chances <= 1)).all()


def test_hints_about_what_is_past_or_unknown_are_ignored(
    experts: tuple[Pilot, list[Example]],
) -> None:
    pilot, examples = experts
    number = {block.path: block.index for block in pilot.vocabulary.blocks}
    step = StepTracker(pilot, examples[0].sample)
    step.observe(number["layers.1.attention"])
    before = step.chances
    step.hint([number["layers.0.experts.1"], number["head"]], [1.0, 1.0])
    assert np.array_equal(step.chances, before)


def exits(count: int, seed: int = 0) -> tuple[object, list[Example]]:
    """Return steps of a loop of two modules that goes on until chance says stop."""
    rng = np.random.default_rng(seed)
    names = vocabulary([("embedding", ""), ("cell", ""), ("judge", ""), ("head", "")])
    examples = []
    for step in range(count):
        rounds = min(1 + int(rng.geometric(0.3)), 8)
        elements = rng.integers(30, size=int(rng.integers(3, 9)))
        examples.append(
            Example(InputFeatures({}, elements), [0, *[1, 2] * rounds, 3], f"f{step % 5}")
        )
    return names, examples


def test_a_loop_that_no_rule_tells_is_asked_for_round_by_round() -> None:
    known, examples = exits(200)
    pilot = fit_pilot(known, examples)
    assert not pilot.loops
    cells = [slot for slot in pilot.template.slots if slot[0] == 1]
    assert cells == [(1, number) for number in range(len(cells))]
    assert max(pilot.bundles) + 1 < len(pilot.bundles)  # a cell and its judge are one question
    example = max(examples, key=lambda one: len(one.blocks))
    step = StepTracker(pilot, example.sample)
    for place, block in enumerate(example.blocks[:-1]):
        step.observe(block)
        if block == 1:
            assert step.remaining()[0] == 2, place
    assert set(step.remaining()) <= {1, 2, 3}


def test_a_loop_whose_last_round_is_short_is_unrolled_too() -> None:
    """A judge after every third cell, and after the last: of a short last round the middle is
    missing, not the end."""
    rng = np.random.default_rng(0)
    names = vocabulary([("embedding", ""), ("cell", ""), ("judge", ""), ("head", "")])
    examples = []
    for step in range(160):
        length = int(rng.integers(2, 12))
        read = int(rng.choice([3, 6])) if length > 6 and rng.random() < 0.2 else length
        order = [b for n in range(read) for b in ([1, 2] if n % 3 == 2 or n == read - 1 else [1])]
        sample = InputFeatures({"length": float(length)})
        examples.append(Example(sample, [0, *order, 3], f"f{step % 8}"))
    pilot = fit_pilot(names, examples)
    assert pilot.template.loops == ()
    order = [0, 1, 1, 1, 2, 1, 1, 2, 3]
    assert pilot.predict(InputFeatures({"length": 5.0})).blocks == order
    step = StepTracker(pilot, InputFeatures({"length": 5.0}))
    for place, block in enumerate(order):
        step.observe(block)
        assert step.remaining() == order[place + 1 :]
