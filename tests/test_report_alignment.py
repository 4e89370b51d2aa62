"""Alignment of predicted and actual blocks: complete, in order, and with the fewest changes."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.reporting.alignment import Kind, align, runs

levenshtein = runpy.run_path(str(Path(__file__).with_name("synthetic_runlog.py")))["levenshtein"]

orders = st.lists(st.sampled_from("abcde"), max_size=14)


def check(predicted: list[str], actual: list[str]) -> int:
    edits = align(predicted, actual)
    assert [e.predicted for e in edits if e.predicted is not None] == predicted
    assert [e.actual for e in edits if e.actual is not None] == actual
    for edit in edits:
        expected = (
            Kind.MISSING
            if edit.predicted is None
            else Kind.EXTRA
            if edit.actual is None
            else Kind.MATCH
            if edit.predicted == edit.actual
            else Kind.SWAP
        )
        assert edit.kind is expected
    grouped = runs(edits)
    assert [edit for run in grouped for edit in run.edits] == edits
    assert all(a.kind is not b.kind for a, b in itertools.pairwise(grouped))
    return sum(edit.kind is not Kind.MATCH for edit in edits)


@settings(deadline=None)
@given(orders, orders)
def test_alignment_has_the_fewest_changes(predicted: list[str], actual: list[str]) -> None:
    assert check(predicted, actual) == levenshtein(tuple(predicted), tuple(actual))
