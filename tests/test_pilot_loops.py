"""Segments: what elements make is found as a rule, or the nearest record is repeated."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynoffload.pilot.loops import LoopModel, Rule, learn_loop
from dynoffload.profiler.input_features import InputFeatures

_synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_pilot.py")))
trees, vocabulary = _synthetic["trees"], _synthetic["vocabulary"]


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


def test_pairs_of_codes_that_never_met_follow_from_each() -> None:
    """The kind says which cell, the arity in which shape: all pairs are foretold from some."""
    names = vocabulary([(f"cells.{kind}", f"{arity}x8") for kind in range(4) for arity in range(5)])
    met = [(kind, arity) for kind in range(4) for arity in range(5) if (kind + arity) % 3]
    samples = [InputFeatures({}, np.array([[arity, kind, 7]] * 3)) for kind, arity in met * 2]
    runs = [(5 * kind + arity,) * 3 for kind, arity in met * 2]
    model = learn_loop(samples, runs, names.blocks)
    for kind in range(4):
        for arity in range(5):
            sample = InputFeatures({}, np.array([[arity, kind, 1]]))
            assert model.predict(sample) == [5 * kind + arity], (kind, arity)


def _check_cells(own: list[tuple[int, int]], met: list[tuple[int, int]], arities: int) -> None:
    """Check that a rule learned from the pairs of kind and arity in ``met`` foretells every pair:
    the block of those that have their ``own``, else the one of the cell for any shape."""
    every = [(kind, arity) for kind in range(4) for arity in range(arities)]
    names = [(f"cells.{kind}", f"{arity}x8") for kind, arity in own]
    known = vocabulary([*names, *((f"cells.{kind}", "") for kind in range(4))])
    right = {pair: known.index_of(f"cells.{pair[0]}", f"{pair[1]}x8") for pair in every}
    assert all((known.blocks[right[pair]].variant == "") == (pair not in own) for pair in every)
    samples = [InputFeatures({}, np.array([[arity, kind, 7]] * 3)) for kind, arity in met * 2]
    model = learn_loop(samples, [(right[pair],) * 3 for pair in met * 2], known.blocks)
    for kind, arity in every:
        wanted = InputFeatures({}, np.array([[arity, kind, 1]]))
        assert model.predict(wanted) == [right[kind, arity]], (kind, arity)


def test_pairs_of_codes_without_a_block_are_the_module_s_block_for_any_shape() -> None:
    met = [(kind, arity) for kind in range(4) for arity in range(5) if (kind + arity) % 3]
    _check_cells(own=met, met=met, arities=5)


def test_shapes_that_share_a_block_say_nothing_against_those_that_have_their_own() -> None:
    """Of many arities the rare ones share a block, others in each cell."""
    every = [(kind, arity) for kind in range(4) for arity in range(20)]
    own = [(kind, arity) for kind, arity in every if (3 * kind + arity) % 5]
    met = [(kind, arity) for kind, arity in every if (kind + arity) % 4]
    _check_cells(own=own, met=met, arities=20)


@given(st.integers(0, 50))
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
