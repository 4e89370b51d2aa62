"""Codes: a sample's elements as columns of integers, and numbers for those that training saw.

`columns_of` gives every sample's elements one form, and `CodeBook` numbers the n-grams of their
columns for the tables of `dynoffload.pilot.association`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]

PAD = -1
"""The code that stands where a sequence has no earlier element."""
MAX_COLUMNS = 8
"""The most columns of an element that are read."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def columns_of(elements: Codes) -> Codes:
    """Return a sample's elements as ``[n, columns]``, at least one column.

    A plain sequence ``[n]`` gets its two predecessors as columns of their own: ``[code, the one
    before, the one before that]``. Elements of more than one column are taken as they are, most
    telling column first, at most `MAX_COLUMNS` of them.
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


@dataclass(frozen=True)
class CodeBook:
    """Numbers for the n-grams of one order that training saw often enough.

    Attributes:
        keys: their hashes, ascending, int64 ``[grams]``; gram ``keys[i]`` has the number ``i + 1``.
    """

    keys: Codes

    def look_up(self, hashes: Codes) -> Codes:
        """Return each hash's number, 0 where it is unknown."""
        if not self.keys.size:
            return np.zeros(hashes.shape, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.keys, hashes), self.keys.size - 1)
        return np.where(self.keys[places] == hashes, places + 1, 0)

    def __len__(self) -> int:
        """Return how many numbers there are, the unknown's 0 included."""
        return int(self.keys.size) + 1


def learn_code_book(hashes: Sequence[Codes], *, least: int, most: int) -> CodeBook:
    """Number the n-grams seen in at least ``least`` samples, the ``most`` frequent of them.

    Args:
        hashes: one array per sample.
        least: samples that must show an n-gram.
        most: n-grams kept.
    """
    shown = [np.unique(h) for h in hashes if h.size]
    if not shown:
        return CodeBook(np.zeros(0, dtype=np.int64))
    keys, counts = np.unique(np.concatenate(shown), return_counts=True)
    keys, counts = keys[counts >= least], counts[counts >= least]
    kept = np.argsort(-counts, kind="stable")[:most]
    return CodeBook(np.sort(keys[kept]))


def load_books(arrays: Mapping[str, npt.NDArray[Any]], count: int) -> tuple[CodeBook, ...]:
    """Return the code books ``book0``, ``book1`` and so on of a stored model.

    Raises:
        ValueError, KeyError: if one is missing, or its keys are not ascending int64.
    """
    books = tuple(CodeBook(arrays[f"book{i}"]) for i in range(count))
    for book in books:
        keys = book.keys
        if keys.dtype != np.int64 or keys.ndim != 1 or not (keys[1:] > keys[:-1]).all():
            raise ValueError("a code book that is not ascending")
    return books


def stored_books(books: Sequence[CodeBook]) -> dict[str, npt.NDArray[Any]]:
    """Return code books as arrays by name, as `load_books` reads them."""
    return {f"book{i}": book.keys for i, book in enumerate(books)}
