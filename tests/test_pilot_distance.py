"""Scores of orders agree with the textbook's table of edits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynoffload.pilot.evaluate import block_order_accuracy, weighted_edit_distance

orders = st.lists(st.integers(0, 6), max_size=90)


def table(first: Sequence[int], second: Sequence[int], weights: Sequence[float]) -> float:
    """The dynamic programme as Wagner and Fischer wrote it, 1974."""
    above = [0.0]
    for b in second:
        above.append(above[-1] + weights[b])
    for a in first:
        line = [above[0] + weights[a]]
        for j, b in enumerate(second):
            swap = 0.0 if a == b else max(weights[a], weights[b])
            line.append(min(above[j + 1] + weights[a], line[j] + weights[b], above[j] + swap))
        above = line
    return above[-1]


@given(orders, orders)
def test_accuracy_is_by_the_levenshtein_distance(a: list[int], b: list[int]) -> None:
    longest = max(len(a), len(b), 1)
    assert block_order_accuracy(a, b) == pytest.approx(1 - table(a, b, [1.0] * 7) / longest)


def test_an_unknown_block_is_wrong_even_where_one_was_predicted() -> None:
    assert block_order_accuracy([-1, 3], [-1, 3]) == 0.5


@given(orders, orders, st.lists(st.integers(0, 50), min_size=7, max_size=7))
def test_weighted_distance_is_the_least_weight_of_edits(
    a: list[int], b: list[int], weights: list[int]
) -> None:
    found = weighted_edit_distance(a, b, np.array(weights, dtype=np.float64))
    assert found == pytest.approx(table(a, b, [float(w) for w in weights]))


def test_an_unknown_block_weighs_the_mean_and_never_matches() -> None:
    weights = np.array([1.0, 3.0])
    assert weighted_edit_distance([-1], [-1], weights) == pytest.approx(2.0)
    assert weighted_edit_distance([], [-1, 0], weights) == pytest.approx(3.0)
