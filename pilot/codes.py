"""Codes: a sample's elements as columns of integers, and numbers for those that training saw.

`columns_of` gives every sample's elements one form, `CodeBook` numbers the n-grams of their columns
for the tables of `dynoffload.pilot.association`, and `Fields` turns elements into rows of an
embedding for `dynoffload.pilot.sequence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.input_features import InputFeatures

Codes = npt.NDArray[np.int64]

PAD = -1
"""The code that stands where a sequence has no earlier element."""
MAX_COLUMNS = 8
"""The most columns of an element that are read."""
MAX_ELEMENTS = 192
"""Elements that are embedded; of a larger sample, evenly spaced ones."""
EMBEDDED_COLUMNS = 4
"""Columns of an element that are embedded on their own."""
MOST_CODES = 4096
"""Codes kept per embedded column, and n-grams kept per order."""

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


@dataclass(frozen=True)
class Fields:
    """How an element becomes rows of an embedding.

    Attributes:
        columns: the code book of each column of its own, then of the bigrams and trigrams.
        grams: how many of the books, at the end, are of n-grams (of two columns, three, ...).
    """

    columns: tuple[CodeBook, ...]
    grams: int

    @property
    def rows(self) -> int:
        """Rows of the embedding that these fields need."""
        return sum(map(len, self.columns))

    def look_up(self, sample: InputFeatures) -> Codes:
        """Return embedding rows ``[elements, fields]``."""
        count = len(sample.elements)
        codes = columns_of(sample.elements)
        if count > MAX_ELEMENTS:
            codes = codes[np.linspace(0, count - 1, MAX_ELEMENTS).astype(np.int64)]
        own = len(self.columns) - self.grams
        keys = [codes[:, min(c, codes.shape[1] - 1)] for c in range(own)]
        if self.grams:
            hashes = hash_prefixes(codes, self.grams + 1)[1:]
            keys += [hashes[min(g, len(hashes) - 1)] for g in range(self.grams)] if hashes else []
        rows = np.empty((len(codes), len(self.columns)), dtype=np.int64)
        offset = 0
        for field, book in enumerate(self.columns):
            rows[:, field] = offset
            if field < len(keys):
                rows[:, field] += book.look_up(keys[field])
            offset += len(book)
        return rows

    @classmethod
    def load(cls, document: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Fields:
        """Return the fields of a stored net; ValueError, KeyError or TypeError if they are none."""
        count, grams = int(document["books"]), int(document["grams"])
        if not 0 <= grams <= 2 or not grams <= count <= EMBEDDED_COLUMNS + 2:
            raise ValueError("the wrong number of code books")
        return cls(load_books(arrays, count), grams)


def learn_fields(samples: Sequence[InputFeatures]) -> Fields:
    """Number the codes and n-grams of the samples' elements."""
    codes = [columns_of(sample.elements) for sample in samples if len(sample.elements)]
    if not codes:
        return Fields((), 0)
    least = 2 if len(codes) > 8 else 1
    width = min(code.shape[1] for code in codes)
    books = [
        learn_code_book([code[:, column] for code in codes], least=least, most=MOST_CODES)
        for column in range(min(width, EMBEDDED_COLUMNS))
    ]
    hashes = [hash_prefixes(code, min(width, 3))[1:] for code in codes]
    grams = len(hashes[0])
    for gram in range(grams):
        of_order = [h[gram] for h in hashes]
        books.append(learn_code_book(of_order, least=least + 1, most=MOST_CODES))
    return Fields(tuple(books), grams)
