"""Scores follow their definitions, and splits hold whole sources out."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynoffload.pilot.baselines import LastOrder, most_frequent_order
from dynoffload.pilot.evaluate import (
    block_order_accuracy,
    byte_weighted_accuracy,
    score,
    site_f1,
    varying_blocks,
)
from dynoffload.pilot.features import Example
from dynoffload.pilot.sources import split_by_source
from dynoffload.profiler.input_features import InputFeatures

_synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_pilot.py")))
block, routed = _synthetic["block"], _synthetic["routed"]
vocabulary = _synthetic["vocabulary"]


def test_block_order_accuracy_is_one_less_edits_over_the_longer_length() -> None:
    assert block_order_accuracy([0, 1, 2], [0, 1, 2]) == 1.0
    assert block_order_accuracy([0, 2], [0, 1, 2, 3]) == pytest.approx(0.5)
    assert block_order_accuracy([], []) == 1.0


def test_an_unseen_block_is_always_wrong() -> None:
    assert block_order_accuracy([0, -1, 2], [0, -1, 2]) == pytest.approx(2 / 3)


def test_varying_blocks_are_those_whose_presence_count_or_place_varies() -> None:
    assert varying_blocks([[0, 1, 2], [0, 1, 2]]) == frozenset()
    assert varying_blocks([[0, 1, 2], [0, 2]]) == {1}
    assert varying_blocks([[0, 1, 1, 2], [0, 1, 2]]) == {1}
    assert varying_blocks([[0, 1, 2], [0, 2, 1]]) == {1, 2}


def test_blocks_that_no_order_has_are_weighed_when_they_run() -> None:
    orders = [[0, 1, 2], [0, 2]]
    assert varying_blocks(orders, 4) == {1, 3}
    blocks = vocabulary([("a", ""), ("b", ""), ("c", ""), ("d", "")]).blocks
    truth, guess = [0, 3, 3, 1, 2], [0, 1, 2]
    varying = varying_blocks(orders, len(blocks))
    assert byte_weighted_accuracy(guess, truth, blocks, varying) == pytest.approx(1 / 3)
    assert site_f1(guess, truth, blocks, varying) == pytest.approx(1 / 2)


def test_byte_weighting_counts_bytes_of_varying_blocks_only() -> None:
    blocks = [block(0, "a", nbytes=1), block(1, "b", nbytes=936), block(2, "c", nbytes=136)]
    varying = frozenset({1, 2})
    # Bytes with activations: b 1000, c 200. Of 1200 true bytes, c's 200 were missed.
    found = byte_weighted_accuracy([0, 1], [0, 1, 2], blocks, varying)
    assert found == pytest.approx(1 - 200 / 1200)
    assert math.isnan(byte_weighted_accuracy([0], [0], blocks, varying))


def test_site_f1_is_over_the_experts_of_a_layer() -> None:
    blocks = [block(0, "l.0.experts.0"), block(1, "l.0.experts.1"), block(2, "l.1.experts.0")]
    every = frozenset({0, 1, 2})
    # Layer 0: predicted {0}, true {0, 1}: 2/3. Layer 1: predicted nothing, true {2}: 0.
    assert site_f1([0], [0, 1, 2], blocks, every) == pytest.approx(1 / 3)


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


def test_scores_are_means_over_samples() -> None:
    vocabulary, examples = routed(4)
    perfect = score(lambda e: e.blocks, examples, vocabulary.blocks, frozenset({3}))
    assert (perfect.block_order_accuracy, perfect.whole_order) == (1.0, 1.0)
    nothing = score(lambda e: [], examples, vocabulary.blocks, frozenset())
    assert nothing.block_order_accuracy == 0.0
    assert math.isnan(nothing.site_f1)
