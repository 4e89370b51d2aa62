"""Predicted against actual blocks of one step, aligned so that a person sees where they part.

What it is: an optimal alignment by edit distance (Levenshtein 1966, the distance that block-order
accuracy is defined by) and its run-length form for display. What it is not: scoring; the runtime
scores steps as they end.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MAX_CELLS = 1_000_000
"""Largest table (predicted x actual) aligned exactly; beyond it difflib's matching is taken."""


class Kind(Enum):
    """What became of one predicted or actual block."""

    MATCH = "match"
    """Predicted and run, in this place."""
    SWAP = "swap"
    """Another block ran in the place of the predicted one."""
    EXTRA = "extra"
    """Predicted, but not run here: fetched for nothing, or too early."""
    MISSING = "missing"
    """Run without having been predicted here: waited for, if it was absent."""


@dataclass(frozen=True)
class Edit:
    """One column of an alignment; the side that has no block there is ``None``."""

    kind: Kind
    predicted: str | None
    actual: str | None


@dataclass(frozen=True)
class Run:
    """Consecutive edits of one kind."""

    kind: Kind
    edits: tuple[Edit, ...]


def align(predicted: Sequence[str], actual: Sequence[str]) -> list[Edit]:
    """Return the columns that turn ``predicted`` into ``actual`` with the fewest changes.

    Exact up to `MAX_CELLS` after the common beginning and end are taken off; for longer sequences
    the alignment is valid but may hold more changes than the least.
    """
    head = 0
    while head < min(len(predicted), len(actual)) and predicted[head] == actual[head]:
        head += 1
    tail = 0
    while (
        tail < min(len(predicted), len(actual)) - head and predicted[-1 - tail] == actual[-1 - tail]
    ):
        tail += 1
    left, right = predicted[head : len(predicted) - tail], actual[head : len(actual) - tail]
    middle = _exact if len(left) * len(right) <= MAX_CELLS else _matched
    same = [Edit(Kind.MATCH, name, name) for name in actual]
    return same[:head] + middle(left, right) + same[len(actual) - tail :]


def runs(edits: Sequence[Edit]) -> list[Run]:
    """Return ``edits`` as runs of one kind, in order."""
    grouped: list[list[Edit]] = []
    for edit in edits:
        if grouped and grouped[-1][0].kind is edit.kind:
            grouped[-1].append(edit)
        else:
            grouped.append([edit])
    return [Run(group[0].kind, tuple(group)) for group in grouped]


def _exact(predicted: Sequence[str], actual: Sequence[str]) -> list[Edit]:
    table = [list(range(len(actual) + 1))]
    for i, left in enumerate(predicted, 1):
        above, row = table[-1], [i]
        for j, right in enumerate(actual, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (left != right)))
        table.append(row)
    edits: list[Edit] = []
    i, j = len(predicted), len(actual)
    while i or j:
        here = table[i][j]
        if i and j and here == table[i - 1][j - 1] + (predicted[i - 1] != actual[j - 1]):
            i, j = i - 1, j - 1
            kind = Kind.MATCH if predicted[i] == actual[j] else Kind.SWAP
            edits.append(Edit(kind, predicted[i], actual[j]))
        elif i and here == table[i - 1][j] + 1:
            i -= 1
            edits.append(Edit(Kind.EXTRA, predicted[i], None))
        else:
            j -= 1
            edits.append(Edit(Kind.MISSING, None, actual[j]))
    return edits[::-1]


def _matched(predicted: Sequence[str], actual: Sequence[str]) -> list[Edit]:
    edits: list[Edit] = []
    matcher = difflib.SequenceMatcher(None, predicted, actual, autojunk=False)
    for _, i0, i1, j0, j1 in matcher.get_opcodes():
        both = min(i1 - i0, j1 - j0)
        for left, right in zip(predicted[i0 : i0 + both], actual[j0 : j0 + both], strict=True):
            edits.append(Edit(Kind.MATCH if left == right else Kind.SWAP, left, right))
        edits += [Edit(Kind.EXTRA, name, None) for name in predicted[i0 + both : i1]]
        edits += [Edit(Kind.MISSING, None, name) for name in actual[j0 + both : j1]]
    return edits
