"""Alignment of predicted and actual blocks: complete, in order, and with the fewest changes."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from dynoffload.reporting.report import align

orders = st.lists(st.sampled_from("abcde"), max_size=14)


@settings(deadline=None)
@given(orders, orders)
def test_alignment_has_the_fewest_changes(predicted: list[str], actual: list[str]) -> None:
    runs = align(predicted, actual)
    edits = [(kind, *edit) for kind, of_kind in runs for edit in of_kind]
    assert [left for _, left, _ in edits if left is not None] == predicted
    assert [right for _, _, right in edits if right is not None] == actual
    for kind, left, right in edits:
        swapped = "match" if left == right else "swap"
        assert kind == ("missing" if left is None else "extra" if right is None else swapped)
    assert all(a[0] != b[0] for a, b in itertools.pairwise(runs))
    changes = sum(kind != "match" for kind, _, _ in edits)
    assert changes == Levenshtein.distance(predicted, actual)
