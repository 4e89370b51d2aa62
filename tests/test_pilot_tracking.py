"""A step is followed block by block, and the rest predicted from what ran."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_pilot import routed, trees, vocabulary

from dynoffload.pilot.features import BlockHint, Example
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.tracking import AT_HAND, StepTracker
from dynoffload.pilot.train import learn_pilot
from dynoffload.profiler.input_features import InputFeatures


def begun(pilot: Pilot, sample: InputFeatures) -> StepTracker:
    """Return the tracker of a step that begins."""
    pilot.predict(sample)
    assert pilot.tracker is not None
    return pilot.tracker


@pytest.fixture(scope="module")
def experts() -> tuple[Pilot, list[Example]]:
    known, examples = routed(120, noise=0.1)
    return learn_pilot(known, examples), examples


@pytest.fixture(scope="module")
def cells() -> Pilot:
    return learn_pilot(*trees(60))


def test_what_went_by_without_running_is_known_not_to_run(
    experts: tuple[Pilot, list[Example]],
) -> None:
    pilot, examples = experts
    known = pilot.vocabulary
    number = {block.path: block.index for block in known.blocks}
    step = begun(pilot, examples[0].sample)
    step.observe([number["embedding"]])
    step.observe([number["layers.0.attention"]])
    step.observe([number["layers.0.experts.3"]])
    rest = step.expect()[0]
    gone = {number[f"layers.0.experts.{e}"] for e in range(4)}
    assert not gone & set(rest)
    step.observe([number["layers.1.attention"]])
    assert not {number[f"layers.0.experts.{e}"] for e in range(12)} & set(step.expect()[0])


def test_a_loop_goes_on_as_its_elements_say_until_a_stranger_runs(cells: Pilot) -> None:
    example = trees(5, seed=4)[1][2]
    step = begun(cells, example.sample)
    for place, block in enumerate(example.blocks):
        step.observe([block])
        assert not step.decided
        assert step.expect()[0] == list(example.blocks[place + 1 :])
    step = begun(cells, example.sample)
    for block in example.blocks[:3]:
        step.observe([block])
    step.observe([-1])
    assert step.decided
    step.observe([example.blocks[3]])
    assert step.expect()[0] == [1]


def test_strangers_and_blocks_out_of_order_do_no_harm(
    experts: tuple[Pilot, list[Example]],
) -> None:
    pilot, examples = experts
    known = pilot.vocabulary
    rng = np.random.default_rng(0)
    for _ in range(20):
        step = begun(pilot, examples[int(rng.integers(120))].sample)
        for block in rng.integers(-1, len(known), size=60).tolist():
            step.observe([block])
            rest = step.expect()[0]
            assert all(0 <= b < len(known) for b in rest)
            assert ((step.chances >= 0) & (step.chances <= 1)).all()


def test_hints_about_what_is_past_or_unknown_are_ignored(
    experts: tuple[Pilot, list[Example]],
) -> None:
    pilot, examples = experts
    number = {block.path: block.index for block in pilot.vocabulary.blocks}
    step = begun(pilot, examples[0].sample)
    step.observe([number["layers.1.attention"]])
    before = step.chances.copy()
    step.hint([number["layers.0.experts.1"], number["layers.1.attention"]], [1.0, 1.0])
    assert np.array_equal(step.chances, before)


def gated(steps: int = 40) -> tuple[Pilot, dict[str, int]]:
    """Return a pilot of three gated blocks, of which chance draws each, and the blocks' numbers."""
    known = vocabulary([(path, "") for path in ("begin", "a", "b", "c", "end")])
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(steps):
        drawn = [block for block in (1, 2, 3) if rng.random() < 0.5]
        hint = [BlockHint(1, (block,), (float(block in drawn),)) for block in (1, 2, 3)]
        examples.append(Example(InputFeatures({}), [0, *drawn, 4], hints=hint))
    return learn_pilot(known, examples), {block.path: block.index for block in known.blocks}


def test_hints_are_about_the_next_decision_or_ahead_of_it() -> None:
    pilot, number = gated()
    step = begun(pilot, InputFeatures({}))
    step.observe([number["begin"]])
    step.hint([number["a"]], [1.0])
    assert number["a"] in step.expect()[0]
    assert not step.at_hand([number["c"]])  # that "a" runs is expected before
    step.hint([number["c"]], [0.0])
    assert number["c"] not in step.expect()[0]
    slots = [block for block, _ in pilot.evidence.slots]
    ahead, at_hand = ({slots[slot] for slot in np.flatnonzero(one)} for one in step.hinted)
    assert (at_hand, ahead) == ({number["a"]}, {number["c"]})
    step.observe([number["a"]])
    step.hint([number["b"]], [0.0])
    assert number["b"] in {slots[slot] for slot in np.flatnonzero(step.hinted[AT_HAND])}


def test_blocks_that_always_run_are_no_decision() -> None:
    """A router that is a block of its own stands between a layer's hint and its experts."""
    known = vocabulary([(path, "") for path in ("begin", "router", "a", "b")])
    orders = [[0, 1, 2], [0, 1, 3], [0, 1, 2, 3], [0, 1]]
    pilot = learn_pilot(known, [Example(InputFeatures({}), order) for order in orders])
    step = begun(pilot, InputFeatures({}))
    step.observe([0])
    step.hint([2, 3], [0.9, 0.1])
    assert step.hinted.sum(axis=1).tolist() == [0, 2]


def test_trust_in_hints_grows_as_they_turn_out_right() -> None:
    pilot, _ = gated()
    before = Pilot(pilot.vocabulary).trust
    assert pilot.trust[AT_HAND, 2] > before[AT_HAND, 2]
    assert np.isfinite(pilot.trust).all()


def test_of_a_chain_what_is_known_of_one_decides_about_the_others() -> None:
    """As many stages run as chance says: one that is passed over ends them all."""
    known = vocabulary([(path, "") for path in ("begin", *(f"stage.{n}" for n in range(6)), "end")])
    rng = np.random.default_rng(0)
    depths = rng.integers(1, 7, size=80).tolist()
    examples = [Example(InputFeatures({}), [*range(depth + 1), 7]) for depth in depths]
    pilot = learn_pilot(known, examples)
    chain = pilot.evidence.nested()
    assert len(set(chain[2:7].tolist())) == 1  # the first stage always runs
    step = begun(pilot, InputFeatures({}))
    before = step.chances[2:7].copy()
    for block in (0, 1, 2):
        step.observe([block])
    assert (step.chances[3:7] > before[1:]).all()
    step.observe([4])  # the third did not run
    assert (step.chances[5:7] == 0).all()


def test_a_glance_expects_what_followed_the_last_order_until_routers_say_more(
    experts: tuple[Pilot, list[Example]],
) -> None:
    pilot, examples = experts
    last = examples[-1].blocks
    steps, order = pilot.evidence.steps, pilot.glance(last).blocks
    slots = [slot[0] for slot in pilot.evidence.slots]
    often = pilot.evidence.after(np.isin(slots, last))
    assert set(order) == {block for block, share in zip(slots, often, strict=True) if share >= 0.5}
    tracker = pilot.tracker
    assert tracker is not None
    seldom = next(block for block, share in zip(slots, often, strict=True) if share < 0.5)
    tracker.hint([seldom], [1.0])
    assert seldom in tracker.expect()[0]
    assert pilot.evidence.steps == steps


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
    pilot = learn_pilot(known, examples)
    assert not pilot.structure.loops
    cells = [slot for slot in pilot.structure.template.slots if slot[0] == 1]
    assert cells == [(1, number) for number in range(len(cells))]
    example = max(examples, key=lambda one: len(one.blocks))
    step = begun(pilot, example.sample)
    for place, block in enumerate(example.blocks[:-1]):
        step.observe([block])
        if block == 1:
            assert step.expect()[0][0] == 2, place
    assert set(step.expect()[0]) <= {1, 2, 3}


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
    pilot = learn_pilot(names, examples)
    assert pilot.structure.template.loops == ()
    order = [0, 1, 1, 1, 2, 1, 1, 2, 3]
    assert pilot.predict(InputFeatures({"length": 5.0})).blocks == order
    step = begun(pilot, InputFeatures({"length": 5.0}))
    for place, block in enumerate(order):
        step.observe([block])
        assert step.expect()[0] == order[place + 1 :]


def test_blocks_observed_at_once_count_as_one_by_one(
    experts: tuple[Pilot, list[Example]], cells: Pilot
) -> None:
    pilot, examples = experts
    for chosen, example in (
        *((pilot, one) for one in examples[:8]),
        (cells, trees(3, seed=4)[1][0]),
    ):
        half = len(example.blocks) // 2
        step = begun(chosen, example.sample)
        step.observe(example.blocks[:half])
        single = begun(chosen, example.sample)
        for block in example.blocks[:half]:
            single.observe([block])
        assert np.array_equal(step.chances, single.chances)
        assert step.expect()[0] == single.expect()[0]


def test_a_chain_is_followed_alike_if_its_blocks_are_observed_at_once() -> None:
    known = vocabulary([(path, "") for path in ("begin", *(f"stage.{n}" for n in range(6)), "end")])
    depths = np.random.default_rng(0).integers(1, 7, size=80).tolist()
    examples = [Example(InputFeatures({}), [*range(depth + 1), 7]) for depth in depths]
    pilot = learn_pilot(known, examples)
    for order in ([0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3, 5]):
        step, single = begun(pilot, InputFeatures({})), begun(pilot, InputFeatures({}))
        step.observe(order)
        for block in order:
            single.observe([block])
        np.testing.assert_allclose(step.chances, single.chances, rtol=1e-6)
