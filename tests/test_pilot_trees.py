"""Trees as arrays give LightGBM's own scores, bit for bit."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.pilot.trees import MAX_LEAVES, Trees

COLUMNS = 6


def trained(seed: int, **more: Any) -> tuple[lightgbm.Booster, np.ndarray]:
    """Return a booster, and the rows that it was trained on: numbers, steps, zeros, a constant."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(2000, COLUMNS)).astype(np.float32)
    rows[:, 2] = np.round(rows[:, 2], 1)
    rows[:, 3] = np.maximum(rows[:, 3], 0)
    rows[:, 4] = 1.0
    truth = rows[:, 0] * rows[:, 1] + rows[:, 2] + rows[:, 3] > rng.normal(size=2000) * 0.3
    options = {"objective": "binary", "num_leaves": 15, "verbosity": -1, "num_threads": 1}
    data = lightgbm.Dataset(rows, truth.astype(np.float32))
    return lightgbm.train({**options, "learning_rate": 0.2, **more}, data, 24), rows


def predicted(trees: Trees, rows: np.ndarray) -> np.ndarray:
    masks = trees.every_leaf(len(rows))
    for column in trees.bins:
        masks &= trees.leaves(column, rows[:, column])
    return trees.score(masks)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_lightgbms_at_and_beside_every_threshold(seed: int) -> None:
    booster, rows = trained(seed)
    trees = Trees.of_booster(booster)
    assert set(trees.bins) == {0, 1, 2, 3, 5}  # the constant says nothing
    tried = [rows]
    extremes = np.array([0, -0.0, 1e-35, -1e-35, 1e-44, -1e-44, 3e38, -3e38], np.float32)
    for column, (edges, _) in trees.bins.items():
        up, down = (np.nextafter(edges, np.float32(way * np.inf)) for way in (1, -1))
        values = np.concatenate((edges, up, down, extremes))
        near = rows[np.arange(len(values)) % len(rows)].copy()
        near[:, column] = values
        tried.append(near)
    every = np.concatenate(tried)
    expected = booster.predict(every, raw_score=True, num_threads=1)
    assert np.array_equal(predicted(trees, every), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(2, MAX_LEAVES), st.integers(1, 400))
def test_trees_of_any_size_come_back_as_they_were(seed: int, leaves: int, least: int) -> None:
    booster, rows = trained(seed, num_leaves=leaves, min_data_in_leaf=least)
    trees = Trees.load(Trees.of_booster(booster).arrays(), COLUMNS)
    assert np.array_equal(predicted(trees, rows), booster.predict(rows, raw_score=True))


def test_a_tree_of_one_leaf_is_a_constant() -> None:
    booster, rows = trained(0, min_data_in_leaf=2000)
    trees = Trees.of_booster(booster)
    assert not trees.bins
    assert np.array_equal(predicted(trees, rows), booster.predict(rows, raw_score=True))


@pytest.mark.parametrize("change", ["counts that overflow", "thresholds in another order"])
def test_thresholds_that_belong_to_no_column_are_refused(change: str) -> None:
    arrays = Trees.of_booster(trained(0)[0]).arrays()
    if change == "counts that overflow":  # their sum in 64 bits is what it was
        arrays["tree_edges"][:4] += 2**62
    else:
        arrays["tree_thresholds"] = arrays["tree_thresholds"][::-1].copy()
    with pytest.raises(ValueError, match="thresholds"):
        Trees.load(arrays, COLUMNS)
