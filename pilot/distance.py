"""Edit distances between two orders of blocks.

What it is: the Levenshtein distance, and its weighted form in which a block costs its bytes. What
it is not: a score; `dynoffload.pilot.evaluate` makes scores of distances.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def edit_distance(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the least number of insertions, deletions and substitutions between two orders.

    Bit-parallel over Python's integers: one column of the table is one integer, so two orders of
    400 blocks take about 0.2 ms. Source: Myers, "A fast bit-vector algorithm for approximate string
    matching", J. ACM 46(3), 1999, in Hyyrö's form for the plain edit distance.
    """
    if len(first) < len(second):
        first, second = second, first
    if not second:
        return len(first)
    matches: dict[int, int] = {}
    for row, block in enumerate(second):
        matches[block] = matches.get(block, 0) | (1 << row)
    mask = (1 << len(second)) - 1
    last = 1 << (len(second) - 1)
    rises, falls, distance = mask, 0, len(second)
    for block in first:
        match = matches.get(block, 0)
        vertical = match | falls
        horizontal = (((match & rises) + rises) ^ rises) | match
        up = falls | (~(horizontal | rises) & mask)
        down = rises & horizontal
        distance += bool(up & last) - bool(down & last)
        up = ((up << 1) | 1) & mask
        down = (down << 1) & mask
        rises = down | (~(vertical | up) & mask)
        falls = up & vertical
    return distance


def weighted_edit_distance(
    first: Sequence[int], second: Sequence[int], weights: npt.NDArray[np.float64]
) -> float:
    """Return the least total weight of edits between two orders.

    Inserting or deleting block ``b`` costs ``weights[b]``; putting one block in another's place
    costs the larger of the two. A negative block is unknown to the vocabulary and costs the mean
    weight.

    Args:
        first: indices into ``weights``, or negative.
        second: the same.
        weights: cost per block, ``[blocks]``, none negative.
    """
    unknown = float(weights.mean()) if weights.size else 1.0
    rows = _costs(first, weights, unknown)
    columns = _costs(second, weights, unknown)
    across = np.concatenate([[0.0], np.cumsum(columns)])
    codes = np.asarray(second, dtype=np.int64)
    line = across.copy()
    for block, cost in zip(first, rows, strict=True):
        best = line + cost
        if codes.size:
            equal = (codes == block) & (codes >= 0)
            swap = np.where(equal, 0.0, np.maximum(columns, cost))
            best[1:] = np.minimum(best[1:], line[:-1] + swap)
        # A run of insertions: best[j] = min over i <= j of best[i] + across[j] - across[i].
        line = np.minimum.accumulate(best - across) + across
    return float(line[-1])


def _costs(
    blocks: Sequence[int], weights: npt.NDArray[np.float64], unknown: float
) -> npt.NDArray[np.float64]:
    """Return the weight of each block of an order, ``unknown`` for negative ones."""
    codes = np.asarray(blocks, dtype=np.int64)
    if not codes.size:
        return np.zeros(0)
    if not weights.size:
        return np.full(codes.size, unknown)
    return np.where(codes >= 0, weights[np.maximum(codes, 0)], unknown)
