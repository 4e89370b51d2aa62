"""The template finds the common order, what is optional, and the loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from synthetic_pilot import routed, trees, vocabulary

from dynoffload.pilot.template import LOOP, learn_template, tokens


def names(*paths: str) -> list[tuple[str, str]]:
    return [(path, "") for path in paths]


def test_experts_stand_in_their_layer_in_canonical_order_though_few_ever_met() -> None:
    known, examples = routed(40, tokens=2, experts=32)
    template = learn_template([e.blocks for e in examples], known.blocks)
    place = [block for block, _ in template.slots]
    assert place == sorted(place)
    assert template.loops == ()
    always = {known.blocks[template.slots[i][0]].path for i in template.always}
    assert always == {"embedding", "layers.0.attention", "layers.1.attention", "head"}


def test_a_block_that_always_runs_twice_has_two_slots_and_is_no_loop() -> None:
    blocks = vocabulary(names("embedding", "encoder", "decoder")).blocks
    template = learn_template([[0, 1, 0, 2], [0, 1, 0, 2]], blocks)
    assert template.slots == ((0, 0), (1, 0), (0, 1), (2, 0))
    assert not len(template.optional)


def test_cells_of_all_variants_form_one_segment_also_those_seen_once() -> None:
    known, examples = trees(20)
    rare = [0, 2, 3, 2, 6, 1]
    orders = [[b for b in e.blocks if b != 6] for e in examples] + [rare]
    template = learn_template(orders, known.blocks)
    assert template.slots == ((0, 0), (LOOP, 0), (1, 0))
    assert template.families == (frozenset({2, 3, 4, 5, 6}),)


def test_an_optional_block_always_inside_a_loop_belongs_to_it() -> None:
    blocks = vocabulary(names("start", "step", "gate", "end")).blocks
    orders = [[0, 1, 2, 1, 3], [0, 1, 1, 1, 3], [0, 1, 3]]
    template = learn_template(orders, blocks)
    assert template.families == (frozenset({1, 2}),)


def test_two_loops_that_never_touch_are_two_families() -> None:
    blocks = vocabulary(names("encode", "bridge", "decode")).blocks
    template = learn_template([[0, 0, 1, 2], [0, 1, 2, 2], [0, 0, 0, 1, 2, 2, 2]], blocks)
    assert template.families == (frozenset({0}), frozenset({2}))
    assert [slot[0] for slot in template.slots] == [LOOP, 1, LOOP - 1]


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
