"""Evidence of what runs: features, tables of codes, and the memory of the latest steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_pilot import routed, vocabulary

from dynoffload.pilot import evidence as module
from dynoffload.pilot.evidence import BIAS, CODE, IDIOMS, NAMES, Evidence
from dynoffload.pilot.pilot import RATE, Pilot
from dynoffload.pilot.train import learn_pilot
from dynoffload.profiler.input_features import InputFeatures

BLOCKS = vocabulary([(f"experts.{number}", "") for number in range(4)]).blocks
SLOTS = [(number, 0) for number in range(4)]


def made() -> Evidence:
    """Return evidence of four experts."""
    evidence = Evidence(BLOCKS)
    evidence.place(SLOTS)
    return evidence


def learn(evidence: Evidence, codes: list[int], ran: list[bool]) -> None:
    """Learn from a step of some codes."""
    shown = evidence.show(InputFeatures({}, np.array(codes)))
    evidence.observe(shown, np.array(ran, np.bool_))


def told(evidence: Evidence, name: str, *codes: int) -> list[float]:
    """Return a feature of each slot for a sample of some codes."""
    shown = evidence.show(InputFeatures({}, np.array(codes)))
    found: list[float] = evidence.features(shown)[NAMES.index(name)].tolist()
    return found


def trained(steps: int = 300) -> Evidence:
    """Return evidence of steps in which code n, of some, runs block n."""
    evidence, rng = made(), np.random.default_rng(0)
    for _ in range(steps):
        codes = rng.integers(10, size=3)
        learn(evidence, codes.tolist(), [number in codes for number in range(4)])
    return evidence


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
SAMPLES = st.tuples(
    st.dictionaries(st.sampled_from("abcd"), NUMBERS),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.lists(st.booleans(), min_size=4, max_size=4),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(SAMPLES, max_size=12))
def test_features_are_finite_and_of_the_stated_shape(steps: list[Any]) -> None:
    evidence = made()
    with np.errstate(all="raise", under="ignore"):
        for values, codes, ran in [*steps, ({}, [], [False] * 4)]:
            shown = evidence.show(InputFeatures(values, np.array(codes, np.int64)))
            features = evidence.features(shown)
            assert features.shape == (len(NAMES), 4)
            assert features.dtype == np.float32
            assert np.isfinite(features).all()
            evidence.observe(shown, np.array(ran, np.bool_))
        evidence.refit()
    assert evidence.steps == len(steps) + 1


def test_a_blocks_code_is_known_before_any_step() -> None:
    evidence = made()
    features = evidence.features(evidence.show(InputFeatures({})))
    assert features[IDIOMS] == pytest.approx(np.log1p([[0], [1], [0], [1], [2], [0]] * np.ones(4)))
    assert features[CODE][2].tolist() == [0, 0.25, 0.5, 0.75]  # the place


def test_places_change_and_what_is_known_stays() -> None:
    evidence = trained(40)
    before, numbers = evidence.statistics.copy(), evidence.steps
    known = told(evidence, "codes", 2)
    assert evidence.place([(2, 0), (3, 1), (0, 0)]) == [1]
    assert evidence.steps == numbers
    assert np.array_equal(evidence.statistics[:, [0, 2]], before[:, [2, 0]])
    assert not evidence.statistics[0, 1]  # a slot that is new has run never
    now = told(evidence, "codes", 2)
    assert (now[0], now[2]) == (known[2], known[0])


def test_what_a_new_slot_did_is_entered_as_if_it_had_been_seen() -> None:
    late, seen = made(), made()
    late.place(SLOTS[:1])
    ran = [True, False, True, True, False]
    for one in ran:
        learn(late, [1], [False])
        learn(seen, [1], [False, one, False, False])
    assert late.place(SLOTS[:2]) == [1]
    late.recall(1, ran)
    counted = slice(0, 7)  # runs, averages, the last two steps, steps since
    assert late.statistics[counted, 1] == pytest.approx(seen.statistics[counted, 1])
    assert late._present[:5, 1].tolist() == ran


def test_tables_learn_which_code_runs_a_block() -> None:
    chances = told(trained(), "codes", 1)
    assert chances[1] > 2 > -2 > max(chances[0], chances[2], chances[3])


def test_a_code_is_not_blamed_for_its_neighbours() -> None:
    """Code 10 runs block 0; code 1 stands beside it two times out of three, and is innocent."""
    evidence, rng = made(), np.random.default_rng(0)
    for _ in range(400):
        guilty = bool(rng.random() < 0.5)
        codes = [10 * guilty, *rng.integers(20, 40, size=6).tolist()]
        codes += [1] * bool(rng.random() < (2 / 3 if guilty else 0.2))
        rng.shuffle(codes)
        learn(evidence, codes, [guilty, False, False, False])
    evidence.refit()
    assert told(evidence, "codes", 10)[0] > 2
    assert told(evidence, "codes", 1)[0] < -1


def test_fitting_again_finds_the_tables_from_the_memory_alone() -> None:
    evidence = trained()
    evidence._table[1:] = np.log1p(-0.1)
    assert max(told(evidence, "codes", 1)) < -2
    for _ in range(4):
        evidence.refit()
    chances = told(evidence, "codes", 1)
    assert chances[1] > 2 > -2 > max(chances[0], chances[2], chances[3])


def test_the_nearest_numbers_say_what_runs() -> None:
    evidence, rng = made(), np.random.default_rng(0)
    for _ in range(60):
        depth = int(rng.integers(1, 5))
        values = {"depth": float(depth), "noise": float(rng.random())}
        ran = np.arange(4) < depth
        evidence.observe(evidence.show(InputFeatures(values)), ran)
    for depth in range(1, 5):
        shown = evidence.show(InputFeatures({"depth": float(depth), "noise": 0.5}))
        chance = evidence.features(shown)[NAMES.index("by best number")]
        assert ((chance > 0) == (np.arange(4) < depth)).all()


def test_tables_keep_within_their_room_as_slots_are_added(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_CELLS", 24)
    evidence = trained(40)
    assert len(evidence._book) == 5
    evidence.place([(number, again) for number in range(4) for again in range(3)])
    assert len(evidence._book) == 1
    learn(evidence, [1, 2, 3], [True] * 12)
    loaded = Evidence.load(BLOCKS, evidence.slots, evidence.document(), evidence.arrays())
    assert loaded._book == evidence._book


def test_a_slots_bias_follows_what_the_evidence_does_not_explain() -> None:
    known, examples = routed(30)
    pilot = Pilot(known)
    for example in examples[:2]:
        pilot.predict(example.sample)
        assert pilot.tracker is not None
        chances = pilot.tracker.chances.copy()
        before = pilot.evidence.statistics[BIAS].copy()
        pilot.observe(example.sample, example.blocks)
        ran = np.isin(np.arange(len(known)), example.blocks)
        expected = 0.98 * (before + RATE * (ran - chances))
        assert pilot.evidence.statistics[BIAS] == pytest.approx(expected, abs=1e-5)


def test_what_long_runs_count_can_be_read_again(tmp_path: Any) -> None:
    pilot = learn_pilot(*routed(12))
    pilot.evidence.steps = 10**8
    pilot.evidence.statistics[0] = 1e8
    pilot.evidence._weights[0] = 1e10  # elements of unknown codes
    pilot.save(tmp_path / "a.pilot")
    assert Pilot.load(tmp_path / "a.pilot").evidence.steps == 10**8
