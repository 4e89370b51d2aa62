"""The skeleton finds the common order, what is optional, and the loops."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynoffload.pilot.skeleton import SEGMENT, learn_skeleton, tokens

_synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_pilot.py")))
routed, trees, vocabulary = _synthetic["routed"], _synthetic["trees"], _synthetic["vocabulary"]


def names(*paths: str) -> list[tuple[str, str]]:
    return [(path, "") for path in paths]


def test_experts_stand_in_their_layer_in_canonical_order_though_few_ever_met() -> None:
    known, examples = routed(40, tokens=2, experts=32)
    skeleton = learn_skeleton([e.blocks for e in examples], known.blocks)
    place = [block for block, _ in skeleton.slots]
    assert place == sorted(place)
    assert skeleton.segments == ()
    always = {known.blocks[skeleton.slots[i][0]].path for i in skeleton.always}
    assert always == {"embedding", "layers.0.attention", "layers.1.attention", "head"}


def test_a_block_that_always_runs_twice_has_two_slots_and_is_no_loop() -> None:
    blocks = vocabulary(names("embedding", "encoder", "decoder")).blocks
    skeleton = learn_skeleton([[0, 1, 0, 2], [0, 1, 0, 2]], blocks)
    assert skeleton.slots == ((0, 0), (1, 0), (0, 1), (2, 0))
    assert skeleton.optional == ()


def test_cells_of_all_variants_form_one_segment_also_those_seen_once() -> None:
    known, examples = trees(20)
    rare = [0, 2, 3, 2, 6, 1]
    orders = [[b for b in e.blocks if b != 6] for e in examples] + [rare]
    skeleton = learn_skeleton(orders, known.blocks)
    assert skeleton.slots == ((0, 0), (SEGMENT, 0), (1, 0))
    assert skeleton.families == (frozenset({2, 3, 4, 5, 6}),)


def test_an_optional_block_always_inside_a_loop_belongs_to_it() -> None:
    blocks = vocabulary(names("start", "step", "gate", "end")).blocks
    orders = [[0, 1, 2, 1, 3], [0, 1, 1, 1, 3], [0, 1, 3]]
    skeleton = learn_skeleton(orders, blocks)
    assert skeleton.families == (frozenset({1, 2}),)


def test_two_loops_that_never_touch_are_two_families() -> None:
    blocks = vocabulary(names("encode", "bridge", "decode")).blocks
    skeleton = learn_skeleton([[0, 0, 1, 2], [0, 1, 2, 2], [0, 0, 0, 1, 2, 2, 2]], blocks)
    assert skeleton.families == (frozenset({0}), frozenset({2}))
    assert [slot[0] for slot in skeleton.slots] == [SEGMENT, 1, SEGMENT - 1]


def test_two_loops_one_right_after_the_other_are_two_families() -> None:
    blocks = vocabulary([("leaf.0", ""), ("node.0", ""), ("leaf.1", ""), ("node.1", "")]).blocks
    orders = [[0, 0, 1, 2, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]]
    skeleton = learn_skeleton(orders, blocks)
    assert skeleton.families == (frozenset({0, 1}), frozenset({2, 3}))
    assert skeleton.slots == ((SEGMENT, 0), (SEGMENT - 1, 0))


def test_unseen_blocks_are_passed_over() -> None:
    blocks = vocabulary(names("a", "b")).blocks
    skeleton = learn_skeleton([[0, -1, 1], [-1, 0, 1]], blocks)
    assert skeleton.slots == ((0, 0), (1, 0))


@given(st.lists(st.lists(st.integers(0, 7), max_size=12), min_size=1, max_size=8))
def test_tokens_lose_no_block_whatever_the_orders(orders: Sequence[list[int]]) -> None:
    blocks = vocabulary(names(*(f"m{i}" for i in range(8)))).blocks
    skeleton = learn_skeleton(orders, blocks)
    assert len(set(skeleton.slots)) == len(skeleton.slots)
    for order in orders:
        filled = tokens(order, skeleton.families)
        assert [block for run in filled.values() for block in run] == order
        assert set(filled) <= set(skeleton.slots)


@given(st.permutations(list(range(10))), st.integers(0, 99))
def test_a_common_order_is_found_again_from_its_subsets(hidden: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = vocabulary(names(*(f"m{i}" for i in range(10)))).blocks
    orders = [[b for b in hidden if rng.random() < 0.6] for _ in range(40)]
    skeleton = learn_skeleton([hidden, *orders], blocks)
    assert [block for block, _ in skeleton.slots] == hidden
