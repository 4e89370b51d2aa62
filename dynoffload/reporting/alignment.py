"""Predicted against actual blocks of one step, aligned so that a person sees where they part.

The alignment has the fewest changes, as block-order accuracy counts them (Levenshtein 1966).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, zip_longest


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


_KINDS = {
    "equal": Kind.MATCH,
    "replace": Kind.SWAP,
    "delete": Kind.EXTRA,
    "insert": Kind.MISSING,
}


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
    """Return the columns that turn ``predicted`` into ``actual`` with the fewest changes."""
    from rapidfuzz.distance import Levenshtein

    edits: list[Edit] = []
    for op in Levenshtein.opcodes(predicted, actual):
        left = predicted[op.src_start : op.src_end]
        right = actual[op.dest_start : op.dest_end]
        edits += [Edit(_KINDS[op.tag], one, other) for one, other in zip_longest(left, right)]
    return edits


def runs(edits: Sequence[Edit]) -> list[Run]:
    """Return ``edits`` as runs of one kind, in order."""
    return [Run(kind, tuple(of_kind)) for kind, of_kind in groupby(edits, key=lambda e: e.kind)]
