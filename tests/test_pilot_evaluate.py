"""Scores follow their definitions, and splits hold whole sources out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_pilot import routed

from dynoffload.pilot.evaluate import (
    LastOrder,
    block_order_accuracy,
    most_frequent_order,
    score,
    varying_blocks,
)
from dynoffload.pilot.features import Example
from dynoffload.pilot.sources import split_by_source
from dynoffload.profiler.input_features import InputFeatures


@pytest.mark.parametrize(
    ("predicted", "true", "accuracy"),
    [
        ([], [], 1.0),
        ([], [1], 0.0),
        ([0, 1, 2, 3], [0, 1, 2, 3], 1.0),
        ([0, 1, 2, 3], [1, 2, 3], 3 / 4),
        ([0, 1, 2], [0, 2, 1], 1 / 3),
        ([0, -1, 2], [0, -1, 2], 2 / 3),  # an unseen block is always wrong
    ],
)
def test_accuracy_is_by_the_levenshtein_distance(
    predicted: list[int], true: list[int], accuracy: float
) -> None:
    assert block_order_accuracy(predicted, true) == pytest.approx(accuracy)


def test_varying_blocks_are_those_whose_presence_count_or_place_varies() -> None:
    assert varying_blocks([[0, 1, 2], [0, 1, 2]]) == frozenset()
    assert varying_blocks([[0, 1, 2], [0, 2]]) == {1}
    assert varying_blocks([[0, 1, 1, 2], [0, 1, 2]]) == {1}
    assert varying_blocks([[0, 1, 2], [0, 2, 1]]) == {1, 2}


def test_blocks_that_no_order_has_are_weighed_when_they_run() -> None:
    orders = [[0, 1, 2], [0, 2]]
    assert varying_blocks(orders, 4) == {1, 3}


def test_the_order_of_what_varies_leaves_all_others_out() -> None:
    sample = InputFeatures({})
    examples = [Example(sample, [0, 1, 2]), Example(sample, [0, -1]), Example(sample, [0])]
    found = score(lambda _: [0, 1], examples, frozenset({1, 2}))
    assert found.varying_order == pytest.approx((1 / 2 + 0 + 0) / 3)
    assert math.isnan(score(lambda _: [0], examples[2:], frozenset({1})).varying_order)


def test_last_order_repeats_what_came_before() -> None:
    last = LastOrder()
    examples = [Example(InputFeatures({}), order) for order in ([0, 1], [0, -1], [2])]
    assert [list(last(e)) for e in examples] == [[], [0, 1], [0]]


def test_most_frequent_is_no_worse_on_its_training_samples_than_any_order_seen() -> None:
    vocabulary, examples = routed(60, noise=0.2)
    orders = [example.blocks for example in examples]
    best = most_frequent_order(orders, vocabulary.blocks)

    def mean(order: list[int]) -> float:
        return sum(block_order_accuracy(order, true) for true in orders) / len(orders)

    modal = max((tuple(o) for o in orders), key=[tuple(o) for o in orders].count)
    assert mean(best) >= mean(list(modal))


@given(
    st.lists(st.sampled_from("abcde"), min_size=2, max_size=60),
    st.floats(0.05, 0.95),
    st.integers(0, 5),
)
def test_a_split_covers_all_and_shares_no_source(
    sources: list[str], share: float, seed: int
) -> None:
    inside, aside = split_by_source(sources, share, seed)
    assert sorted(inside + aside) == list(range(len(sources)))
    assert inside
    assert aside
    if len(set(sources)) > 1:
        assert not {sources[i] for i in inside} & {sources[i] for i in aside}
    else:
        assert max(inside) < min(aside)
