"""Segments: what elements make is found as a rule, or the nearest record is repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_pilot import trees, vocabulary

from dynoffload.pilot.loops import LoopModel, Rule, learn_loop
from dynoffload.profiler.input_features import InputFeatures


def sample(*rows: tuple[int, ...], **values: float) -> InputFeatures:
    return InputFeatures(values, np.array(rows, dtype=np.int64))


def test_one_cell_per_node_by_arity_is_a_table_over_the_arity_alone() -> None:
    _, examples = trees(30)
    model = learn_loop([e.sample for e in examples], [tuple(e.blocks[1:-1]) for e in examples])
    assert isinstance(model.how, Rule)
    assert model.how.columns == (0,)
    assert model.fidelity == 1.0
    _, fresh = trees(10, seed=9)
    for example in fresh:
        assert model.predict(example.sample) == list(example.blocks[1:-1])


def test_elements_that_make_none_or_several_blocks_are_solved_for() -> None:
    # Kind 0 makes nothing, kind 1 makes (7,), kind 2 makes (8, 9).
    made = {0: (), 1: (7,), 2: (8, 9)}
    rng = np.random.default_rng(0)
    samples, runs = [], []
    for _ in range(40):
        kinds = rng.integers(3, size=int(rng.integers(3, 20)))
        samples.append(
            InputFeatures({}, np.stack([rng.integers(99, size=kinds.size), kinds], axis=1))
        )
        runs.append(tuple(b for kind in kinds.tolist() for b in made[kind]))
    model = learn_loop(samples, runs)
    assert isinstance(model.how, Rule)
    assert model.how.columns == (1,)
    assert model.predict(sample((5, 2), (6, 0), (7, 1))) == [8, 9, 7]


def test_two_columns_are_used_where_one_does_not_tell() -> None:
    rng = np.random.default_rng(1)
    samples, runs = [], []
    for _ in range(60):
        codes = rng.integers(2, size=(12, 3))
        samples.append(InputFeatures({}, codes))
        runs.append(tuple((codes[:, 0] ^ codes[:, 2]).tolist()))
    model = learn_loop(samples, runs)
    assert isinstance(model.how, Rule)
    assert model.how.columns == (0, 2)
    assert model.predict(sample((1, 0, 0), (1, 1, 1))) == [1, 0]


def test_a_code_never_seen_is_taken_for_its_nearest() -> None:
    samples = [sample((1, 0), (8, 0)), sample((8, 1), (1, 1), (1, 0))]
    model = learn_loop(samples, [(0, 1), (1, 0, 0)])
    assert model.predict(sample((9, 0), (2, 0))) == [1, 0]


def test_a_loop_that_no_rule_tells_repeats_the_most_frequent_stretch() -> None:
    rng = np.random.default_rng(2)
    samples = [
        InputFeatures({}, rng.integers(50, size=int(rng.integers(5, 30)))) for _ in range(40)
    ]
    runs = [(4, 5) * (2 if step % 3 else int(rng.integers(3, 6))) for step in range(40)]
    model = learn_loop(samples, runs)
    assert model.how == (4, 5, 4, 5)
    assert model.fidelity == sum(run == (4, 5) * 2 for run in runs) / 40


@pytest.mark.parametrize(
    ("arities", "own", "met"),
    [
        (5, lambda *_: True, lambda kind, arity: (kind + arity) % 3),
        (5, lambda kind, arity: (kind + arity) % 3, lambda kind, arity: (kind + arity) % 3),
        (20, lambda kind, arity: (3 * kind + arity) % 5, lambda kind, arity: (kind + arity) % 4),
    ],
    ids=["each has a block", "those that met have one", "the rare share a block"],
)
def test_pairs_of_codes_that_never_met_follow_from_each(
    arities: int, own: Callable[[int, int], Any], met: Callable[[int, int], Any]
) -> None:
    """The kind says which cell, the arity in which shape: from the pairs that met, every pair is
    predicted. Those without a block of their own run the one of the cell for any shape."""
    every = [(kind, arity) for kind in range(4) for arity in range(arities)]
    names = [(f"cells.{kind}", f"{arity}x8") for kind, arity in every if own(kind, arity)]
    known = vocabulary([*names, *((f"cells.{kind}", "") for kind in range(4))])
    right = {pair: known.index_of(f"cells.{pair[0]}", f"{pair[1]}x8") for pair in every}
    assert all(bool(known.blocks[right[pair]].variant) == bool(own(*pair)) for pair in every)
    seen = [pair for pair in every if met(*pair)] * 2
    samples = [InputFeatures({}, np.array([[arity, kind, 7]] * 3)) for kind, arity in seen]
    model = learn_loop(samples, [(right[pair],) * 3 for pair in seen], known.blocks)
    for kind, arity in every:
        wanted = InputFeatures({}, np.array([[arity, kind, 1]]))
        assert model.predict(wanted) == [right[kind, arity]], (kind, arity)


@given(st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_a_model_is_the_same_after_json(seed: int) -> None:
    _, examples = trees(8, seed=seed)
    samples = [e.sample for e in examples]
    for runs in ([tuple(e.blocks[1:-1]) for e in examples], [(3,) * (seed % 5)] * len(examples)):
        model = learn_loop(samples, runs)
        again = LoopModel.from_json(json.loads(json.dumps(model.to_json())), 7)
        assert [again.predict(s) for s in samples] == [model.predict(s) for s in samples]


@pytest.mark.parametrize(
    "damage",
    [
        {"table": []},
        {"table": [[[0], [7]]]},
        {"table": [[[0, 1], [2]]]},
        {"columns": [99]},
        {"fidelity": "high"},
        {"columns": None},
        {"run": [7], "columns": None},
    ],
)
def test_damaged_data_is_refused(damage: dict[str, object]) -> None:
    good = {"fidelity": 1.0, "columns": [0], "table": [[[0], [2]]]}
    LoopModel.from_json(good, 7)
    with pytest.raises((ValueError, LookupError, TypeError)):
        LoopModel.from_json({**good, **damage}, 7)
