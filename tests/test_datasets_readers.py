"""Digits and statements: the same for the same seed, apart by split, of their kind."""

from __future__ import annotations

import ast
from itertools import islice
from typing import Any

import pytest
import torch

from dynoffload.datasets.images import digits
from dynoffload.datasets.statements import KINDS, statements


def test_digits_are_the_same_for_the_same_seed_and_apart_by_split() -> None:
    first, again = (next(digits(rows=3, seed=4)) for _ in range(2))
    assert torch.equal(first.images, again.images)
    assert first.images.shape == (3, 1, 8, 8)
    assert 0 <= float(first.images.min()) <= float(first.images.max()) <= 1
    trained, aside = (
        {one.source for one in islice(digits(split), 400)} for split in ("train", "held-out")
    )
    assert not trained & aside
    assert len({int(one.labels) for one in islice(digits(), 100)}) == 10
    with pytest.raises(ValueError, match="at least one image"):
        digits(rows=0)


def test_statements_are_whole_and_of_their_kind() -> None:
    for one in islice(statements(max_bytes=80), 60):
        text = bytes(one.tokens.tolist()).decode()
        (parsed,) = ast.parse(text).body if KINDS[int(one.label)] not in _INSIDE else _inside(text)
        assert type(parsed).__name__ == KINDS[int(one.label)]


_INSIDE = {"Return", "Break", "Continue", "Nonlocal"}


def _inside(text: str) -> list[Any]:
    loop = "def f():\n x = 0\n def g():\n  while True:\n   " + text.replace("\n", "\n   ")
    function: Any = ast.parse(loop).body[0]
    return list(function.body[1].body[0].body)


def test_statements_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="do not exist"):
        statements(min_bytes=9, max_bytes=8)
