"""Association tables: the probability that an element's codes run a block, learned from steps.

`Association` is a table of P(an element with this n-gram runs this block). Traces record which
blocks a whole step ran, not which element ran them, and a block runs if any element runs it. So the
tables are a noisy-or, fitted by expectation-maximisation. Counting co-occurrences would credit
every element of a step with the blocks of all others. Shorter n-grams are the prior of longer ones.

Sources: Pearl, "Probabilistic Reasoning in Intelligent Systems", 1988 (noisy-or); Dempster, Laird
and Rubin 1977 (EM); Katz 1987 (backing off to shorter n-grams).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.codes import Codes, columns_of, hash_prefixes, learn_book, look_up
from dynoffload.profiler.input_features import InputFeatures

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

ORDERS = 3
"""Unigrams, bigrams and trigrams."""
LEAST = (1, 3, 3)
"""Samples that must contain an n-gram, by order."""
MOST = (1024, 1024, 512)
"""N-grams kept, by order: with 400 blocks, 2 MB as float16."""
STRENGTH = (1.0, 4.0, 4.0)
"""Weight of the prior from an n-gram's prefix, in observations, by order."""
ITERATIONS = 8
"""Rounds of EM per order; the estimates converge within half of them."""

_SMALL = 1e-5


@dataclass(frozen=True)
class Association:
    """P(an element runs a block), by the longest known n-gram of the element.

    Attributes:
        books: for each order, the hashes of its known n-grams, ascending.
        table: ``log(1 - P)``, float32 ``[rows, blocks]``: row 0 for an unknown code, then the rows
            of each book in turn.
    """

    books: tuple[Codes, ...]
    table: Floats

    def rows(self, sample: InputFeatures) -> Codes:
        """Return the table row of each of a sample's elements; empty if no codes were learned."""
        if not len(sample.elements) or not self.books:
            return np.zeros(0, dtype=np.int64)
        hashes = hash_prefixes(columns_of(sample.elements), len(self.books))
        rows = np.zeros(len(hashes[0]), dtype=np.int64)
        offset = 0
        for book, values in zip(self.books, hashes, strict=False):
            numbers = look_up(book, values)
            rows = np.where(numbers > 0, numbers + offset, rows)
            offset += len(book)
        return rows

    def evidence(self, sample: InputFeatures) -> tuple[Floats, Floats]:
        """Return ``log P(no element runs it)`` and ``log(1 - P)`` of the likeliest single element,
        each ``[blocks]``."""
        rows = self.rows(sample)
        if not rows.size:
            nothing = np.zeros(self.table.shape[1], dtype=np.float32)
            return nothing, nothing
        found = self.table[rows]
        return found.sum(axis=0), found.min(axis=0)


def learn_association(samples: Sequence[InputFeatures], present: Bools) -> Association:
    """Fit the tables.

    Args:
        samples: one per step.
        present: which block ran in which step, ``[steps, blocks]``.
    """
    blocks = present.shape[1]
    sizes = np.array([len(sample.elements) for sample in samples])
    mean = max(float(sizes.mean()), 1.0) if sizes.size else 1.0
    share = np.clip((present.sum(axis=0) + 0.5) / (len(samples) + 1.0), 1e-4, 1 - 1e-4)
    base = (1 - (1 - share) ** (1 / mean)).astype(np.float32)
    chance = np.clip(base[None, :], _SMALL, 1 - _SMALL)
    hashes = [
        hash_prefixes(columns_of(sample.elements), ORDERS) if len(sample.elements) else []
        for sample in samples
    ]
    width = min((len(h) for h in hashes if h), default=0)
    books: list[Codes] = []
    rows = [np.zeros(size, dtype=np.int64) for size in sizes]
    for order in range(width):
        of_order = [h[order] if h else np.zeros(0, dtype=np.int64) for h in hashes]
        book = learn_book(of_order, least=LEAST[order], most=MOST[order])
        prefix = np.zeros(len(book) + 1, dtype=np.int64)
        offset = len(chance) - 1
        for step, values in enumerate(of_order):
            numbers = look_up(book, values)
            prefix[numbers] = rows[step]
            rows[step] = np.where(numbers > 0, numbers + offset, rows[step])
        prior = chance[prefix[1:]]
        fixed = len(chance)
        chance = np.concatenate([chance, prior])
        chance = _maximise(rows, present, chance, prior, fixed, STRENGTH[order])
        books.append(book)
    table = np.log1p(-chance).astype(np.float32).reshape(-1, blocks)
    return Association(tuple(books), table)


def _maximise(
    rows: list[Codes], present: Bools, chance: Floats, prior: Floats, fixed: int, strength: float
) -> Floats:
    """Return ``chance`` with the rows from ``fixed`` on fitted by EM, regularised by ``prior``."""
    size = len(chance)  # of a step's counts: how often each row of the table occurs in it
    flat = np.concatenate([step * size + of_step for step, of_step in enumerate(rows)])
    count = np.bincount(flat, minlength=len(rows) * size).reshape(-1, size).astype(np.float32)
    own = count[:, fixed:].T
    weight = (own.sum(axis=1) + np.float32(strength))[:, None]
    for _ in range(ITERATIONS):
        any_runs = -np.expm1(count @ np.log1p(-chance))
        share = np.where(present, 1 / np.maximum(any_runs, _SMALL), 0)
        fitted = chance[fixed:] * (own @ share.astype(np.float32)) + np.float32(strength) * prior
        chance = np.concatenate([chance[:fixed], np.clip(fitted / weight, _SMALL, 1 - 1e-3)])
    return chance
