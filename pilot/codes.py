"""Codes: a sample's elements as integer columns, and hashes of their n-grams."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]

PAD = -1
"""The code for a missing predecessor at the start of a sequence."""
MAX_COLUMNS = 8
"""The most columns of an element that are used."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def columns_of(elements: Codes) -> Codes:
    """Return a sample's elements as ``[n, columns]``, at least one column.

    Each element of a plain sequence ``[n]`` gets its two predecessors as columns: ``[code,
    previous, one before that]``. Elements of several columns are kept as they are, the most
    informative column first, at most `MAX_COLUMNS` of them.
    """
    codes = np.asarray(elements, dtype=np.int64)
    if codes.ndim == 2 and codes.shape[1] > 1:
        return codes[:, :MAX_COLUMNS]
    flat = codes.reshape(-1)
    result = np.full((flat.size, 3), PAD, dtype=np.int64)
    result[:, 0] = flat
    result[1:, 1] = flat[:-1]
    result[2:, 2] = flat[:-2]
    return result


def hash_prefixes(columns: Codes, orders: int) -> list[Codes]:
    """Return a 64-bit hash of each element's first column, first two columns, and so on.

    Elements with fewer columns than ``orders`` give fewer arrays.
    """
    state = np.zeros(len(columns), dtype=np.uint64)
    result: list[Codes] = []
    with np.errstate(over="ignore"):
        for column in range(min(orders, columns.shape[1])):
            state = (state ^ columns[:, column].astype(np.uint64)) + np.uint64(column + 1)
            state *= _MULTIPLIER
            state ^= state >> _SHIFT
            result.append(state.view(np.int64))
    return result
