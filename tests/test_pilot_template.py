"""What orders have in common: scores, splits, the template, and loops that elements decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_pilot import routed, trees, vocabulary

from dynoffload.pilot.evaluate import LastOrder, block_order_accuracy, score, varying_blocks
from dynoffload.pilot.features import Example
from dynoffload.pilot.loops import Rule, learn_loop
from dynoffload.pilot.sources import split_by_source
from dynoffload.pilot.template import LOOP, learn_template, tokens
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
    assert varying_blocks([[0, 1, 2], [0, 2]], 4) == {1, 3}  # a block that no order has


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


def names(*paths: str) -> list[tuple[str, str]]:
    return [(path, "") for path in paths]


def test_experts_stand_in_their_layer_in_canonical_order_though_few_ever_met() -> None:
    known, examples = routed(40, tokens=2, experts=32)
    template = learn_template([e.blocks for e in examples], known.blocks)
    place = [block for block, _ in template.slots]
    assert place == sorted(place)
    assert template.loops == ()


def test_cells_of_all_variants_form_one_segment_also_those_seen_once() -> None:
    known, examples = trees(20)
    rare = [0, 2, 3, 2, 6, 1]
    orders = [[b for b in e.blocks if b != 6] for e in examples] + [rare]
    template = learn_template(orders, known.blocks)
    assert template.slots == ((0, 0), (LOOP, 0), (1, 0))
    assert template.families == (frozenset({2, 3, 4, 5, 6}),)


def test_an_optional_block_always_inside_a_loop_belongs_to_it() -> None:
    blocks = vocabulary(names("start", "step", "gate", "end")).blocks
    template = learn_template([[0, 1, 2, 1, 3], [0, 1, 1, 1, 3], [0, 1, 3]], blocks)
    assert template.families == (frozenset({1, 2}),)


def test_two_loops_one_right_after_the_other_are_two_families() -> None:
    blocks = vocabulary([("leaf.0", ""), ("node.0", ""), ("leaf.1", ""), ("node.1", "")]).blocks
    orders = [[0, 0, 1, 2, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]]
    template = learn_template(orders, blocks)
    assert template.families == (frozenset({0, 1}), frozenset({2, 3}))
    assert template.slots == ((LOOP, 0), (LOOP - 1, 0))


@given(st.lists(st.lists(st.integers(0, 7), max_size=12), min_size=1, max_size=8))
def test_tokens_lose_no_block_whatever_the_orders(orders: Sequence[list[int]]) -> None:
    blocks = vocabulary(names(*(f"m{i}" for i in range(8)))).blocks
    template = learn_template(orders, blocks)
    assert len(set(template.slots)) == len(template.slots)
    for order in orders:
        filled = tokens(order, template.families)
        assert [block for run in filled.values() for block in run] == order
        assert set(filled) <= set(template.slots)


@given(st.permutations(list(range(10))), st.integers(0, 99))
def test_a_common_order_is_found_again_from_its_subsets(hidden: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = vocabulary(names(*(f"m{i}" for i in range(10)))).blocks
    orders = [[b for b in hidden if rng.random() < 0.6] for _ in range(40)]
    template = learn_template([hidden, *orders], blocks)
    assert [block for block, _ in template.slots] == hidden


def sample(*rows: tuple[int, ...], **values: float) -> InputFeatures:
    return InputFeatures(values, np.array(rows, dtype=np.int64))


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
