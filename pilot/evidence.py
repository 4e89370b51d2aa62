"""Evidence: what the steps of one network so far say about which of its blocks run next.

`Evidence` keeps statistics of each slot (how often and how lately it ran), tables of which codes of
a sample run it, and a memory of the latest samples. `features` returns, for each slot, what the
general pilot (`dynoffload.pilot.general`) looks at: these statistics and the block's code, which is
its bytes, its place, the size of its site and, if known, its six idiom counts. All of it is learned
online.

[Note: tables]  A step shows which blocks ran, not which element of the sample ran them, and a block
runs if any element runs it. So a table is a noisy-or: P(an element with this n-gram of codes runs
the block). It is fitted by expectation-maximisation, after each step for its own n-grams, and by
`refit` over the memory. An n-gram starts with the row of the one that is shorter by a code.

Sources: Pearl, "Probabilistic Reasoning in Intelligent Systems", 1988 (noisy-or); Cappé and
Moulines, "On-line expectation-maximization", 2009; Katz 1987 (backing off to shorter n-grams).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.codes import Codes, columns_of, hash_prefixes
from dynoffload.pilot.features import Floats, sites_of
from dynoffload.pilot.template import Slot
from dynoffload.planning.blocks import Block
from dynoffload.profiler.input_features import InputFeatures

Bools = npt.NDArray[np.bool_]

MEMORY = 256
"""The latest steps that are remembered."""
NEIGHBOURS = 8
"""Steps with the most similar numbers that are compared."""
MAX_NUMBERS = 32
"""The most named numbers of a sample that are used."""
LARGEST = 3e38
"""The largest magnitude of a number of a sample; larger ones are cut off."""
MAX_ROWS = 4096
"""The most n-grams of a table, ..."""
MAX_CELLS = 2_000_000
"""... and the most of its cells, with which a pilot's file stays below 5 MB."""
MAX_CODES = 1024
"""The most elements of a sample that tables look at."""
ORDERS = 3
"""Unigrams, bigrams and trigrams."""
MOST = 1e12
"""The largest number of a pilot's file."""
LEAST = (1, 3, 3)
"""Steps that must have an n-gram before it gets a row, by order."""

_RATES = np.array([0.4, 0.1, 0.02], np.float32)[:, None]  # of the moving averages of presence
_COUNT, _MEANS, _LAST, _BEFORE, _SINCE, _PAIRS = 0, slice(1, 4), 4, 5, 6, slice(7, 11)
BIAS, HABIT = 11, 12
STATISTICS = 13
"""Rows of `Evidence.statistics`: runs, three moving averages of these, whether it ran in the last
step and the one before, steps since, how often each of two outcomes followed each; and two that
`dynoffload.pilot.pilot` learns."""
_LONG = 99.0  # steps since a slot ran that never did
_PAIRS_KEPT = 0.99  # weight of earlier pairs at each step
_SMALL, _MOST = 1e-5, 0.999  # limits of a table's chances
_SUREST = -8.0  # less than log(1 - _MOST), which float16 rounds
_UNKNOWN = np.float32(np.log1p(-0.02))  # of codes before anything is known
_STRENGTH, _LEAST_RATE = (1.0, 4.0, 4.0), 0.02  # of priors, by order in elements; of updates
_KEPT = 0.985  # weight of earlier steps in `refit`
_ROUNDS = 4  # of EM in `refit`
_WIDTH = 0.05  # of the kernel over a single number, in standard deviations
_NESTED = 4  # steps in which a slot must have run, and must not have run, to be in a chain
_ADAPTING = 256  # steps in which the best number is looked for

NAMES = (
    *("steps", "share", "lately 0.4", "lately 0.1", "lately 0.02", "ran last", "ran before"),
    *("since", "given last", "codes", "likeliest code", "expected of site", "codes in site"),
    *("codes known", "codes seen", "neighbours", "nearest", "distance", "by best number"),
    *("alike by it", "elements", "more than last", "more than usual", "site ran last"),
    *("site lately", "share of site", "site over expected", "rank by codes", "rank lately"),
    *("ran always", "site", "occurrence", "place", "bytes"),
    *("transpose", "gather", "scatter", "reduction", "stream", "stencil"),
)
"""The features of a slot, in order."""
IDIOMS = slice(NAMES.index("transpose"), len(NAMES))
"""Where the six idiom counts are among them."""
CODE = slice(NAMES.index("site"), len(NAMES))
"""Where the block's code is: what is known before any step."""


@dataclass(frozen=True)
class Shown:
    """One sample as evidence sees it.

    Attributes:
        size: number of its elements.
        numbers: that and its named numbers, compressed, ``[numbers]``.
        hashes: of its elements' n-grams, ``[orders, elements]``.
        rows: the table's rows of its elements, each once.
        counts: elements of each of these rows.
    """

    size: int
    numbers: Floats
    hashes: Codes
    rows: Codes
    counts: Floats


class Evidence:
    """Statistics of the slots of one network; slots hold one block each.

    Attributes:
        slots: the slots.
        steps: number of steps observed.
        statistics: ``[STATISTICS, slots]``.
        sites: number of each slot's site, ``[slots]``.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self.slots: tuple[Slot, ...] = ()
        self.steps = 0
        self.statistics = np.zeros((STATISTICS, 0), np.float32)
        self._names: dict[str, int] = {}  # of numbers; 0 is the number of elements
        self._losses = np.zeros(1, np.float32)  # of each number as the only predictor
        self._numbers = np.zeros((MEMORY, 1), np.float32)
        self._present = np.zeros((MEMORY, 0), np.bool_)
        self._hashes: list[Codes | None] = [None] * MEMORY  # None: not in the pilot's file
        self._book: dict[int, int] = {}  # hash of an n-gram -> row
        self._waiting: list[Counter[int]] = [Counter() for _ in range(ORDERS)]
        self._table = np.zeros((64, 0), np.float32)  # log(1 - P); row 0 is of unknown codes
        self._weights = np.zeros(64, np.float32)  # elements seen of each row
        self._orders = np.zeros(64, np.int64)  # codes of each row's n-gram, less one
        self._shorter = np.zeros(64, np.int64)  # row of the n-gram that is shorter by a code
        self._usual = 1.0  # elements of a sample
        self._latest = 0.0  # those of the last sample
        self.place(())

    @property
    def _remembered(self) -> int:
        return min(self.steps, MEMORY)

    @property
    def always(self) -> Bools:
        """Whether each slot ran in every step so far, ``[slots]``."""
        return np.asarray((self.statistics[_COUNT] >= self.steps) & (self.steps > 0))

    def after(self, ran: Bools) -> Floats:
        """Return the chance that each slot runs after a step of which it is known whether each
        slot ran, ``[slots]``."""
        share = (self.statistics[_COUNT] + 0.5) / (self.steps + 1)
        pairs = self.statistics[_PAIRS].reshape(2, 2, -1)
        ran_then = (pairs[:, 1] + share) / (pairs.sum(axis=1) + 1)
        return np.asarray(np.where(ran, ran_then[1], ran_then[0]))

    @property
    def _most_rows(self) -> int:
        return min(MAX_ROWS, max(1, MAX_CELLS // max(1, len(self.slots))))

    def place(self, slots: Sequence[Slot]) -> list[int]:
        """Change the slots; return the places of those that are new, of which nothing is known."""
        old = {slot: number for number, slot in enumerate(self.slots)}
        take = np.array([old.get(slot, -1) for slot in slots], np.int64)
        known = take >= 0

        def moved(array: npt.NDArray[Any], fill: Any = 0) -> npt.NDArray[Any]:
            made = np.full((len(array), len(slots)), fill, array.dtype)
            made[:, known] = array[:, take[known]]
            return made

        self.statistics = moved(self.statistics)
        self.statistics[_SINCE, ~known] = _LONG
        self._present = moved(self._present)
        self._table = moved(self._table, _UNKNOWN)
        self.slots = tuple(slots)
        if len(self._book) >= self._most_rows:
            self._book = dict(islice(self._book.items(), self._most_rows - 1))
            self._table = self._table[: self._most_rows]
            self._weights = self._weights[: self._most_rows]
            self._orders = self._orders[: self._most_rows]
            self._shorter = self._shorter[: self._most_rows]
        self._describe()
        return np.flatnonzero(~known).tolist()

    def _describe(self) -> None:
        """Compute what is known of the slots' blocks."""
        blocks, slots = self._blocks, self.slots
        of = [blocks[block] for block, _ in slots]
        self.sites = sites_of(of, range(len(of)))
        self._sizes = np.bincount(self.sites)[self.sites].astype(np.float32)
        self._starts = np.cumsum(np.bincount(self.sites, minlength=1)) - np.bincount(
            self.sites, minlength=1
        )
        code = np.zeros((len(NAMES) - CODE.start, len(of)))
        code[0], code[2] = np.log1p(self._sizes), np.arange(len(of)) / max(1, len(of))
        code[1] = [occurrence for _, occurrence in slots]
        code[3] = np.log([max(1, block.nbytes) for block in of])
        code[3] -= code[3].max(initial=0)
        idioms = np.array([block.idioms for block in of], np.float64).reshape(-1, 6)
        idioms[~idioms.any(axis=1)] = np.nan  # not known
        code[4:] = np.log1p(idioms.T)
        self._code = code.astype(np.float32)

    def recall(self, slot: int, ran: Sequence[bool]) -> None:
        """Enter whether a new slot ran in the latest steps, oldest first."""
        late = np.array(ran[-MEMORY:], np.float32)
        of = self.statistics[:, slot]
        of[_COUNT] = late.sum()
        for one in late:
            of[_MEANS] += _RATES[:, 0] * (one - of[_MEANS])
        of[_LAST], of[_BEFORE] = late[-1:].sum(), late[-2:-1].sum()
        runs = np.flatnonzero(late)
        of[_SINCE] = len(late) - 1 - runs[-1] if len(runs) else _LONG
        places = np.arange(self.steps - len(late), self.steps) % MEMORY
        self._present[places, slot] = late > 0

    def show(self, sample: InputFeatures) -> Shown:
        """Look up a sample before it runs."""
        for name in sample.values:
            if name not in self._names and len(self._names) < MAX_NUMBERS:
                self._names[name] = len(self._names) + 1
                self._numbers = np.pad(self._numbers, ((0, 0), (0, 1)))
                self._losses = np.append(self._losses, np.float32(0))
        numbers = np.zeros(len(self._names) + 1)
        numbers[0] = len(sample.elements)
        for name, value in sample.values.items():
            if name in self._names:
                numbers[self._names[name]] = value
        numbers = np.clip(np.nan_to_num(numbers), -LARGEST, LARGEST)
        compressed = (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32)
        hashes = np.zeros((0, 0), np.int64)
        if len(sample.elements):
            hashes = np.stack(hash_prefixes(columns_of(sample.elements[:MAX_CODES]), ORDERS))
        return Shown(len(sample.elements), compressed, hashes, *self._rows(hashes))

    def _rows(self, hashes: Codes) -> tuple[Codes, Floats]:
        """Return the row of each element's longest known n-gram, once each, and their counts."""
        if not hashes.size:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        find = self._book.get
        rows = np.zeros(hashes.shape[1], np.int64)
        left = np.arange(hashes.shape[1])  # elements without a row yet
        for order in hashes[::-1]:
            rows[left] = [find(code, 0) for code in order[left].tolist()]
            left = left[rows[left] == 0]
        unique, counts = np.unique(rows, return_counts=True)
        return unique, counts.astype(np.float32)

    def features(self, shown: Shown) -> Floats:
        """Return the features of each slot for a sample, float32 ``[NAMES, slots]``."""
        made = np.empty((len(NAMES), len(self.slots)), np.float32)
        if not len(self.slots):
            return made
        of, steps, sites, sizes = self.statistics, self.steps, self.sites, self._sizes
        share = (of[_COUNT] + 0.5) / (steps + 1)
        made[0] = np.log1p(steps)
        made[1] = share
        made[2:5] = of[_MEANS] + 0.5 * (1 - _RATES) ** steps
        made[8] = self.after(of[_LAST] > 0)
        elements = float(shown.size)
        silent, surest, known, seen = self._by_codes(shown)
        some = -np.expm1(silent)
        made[9], made[10] = some, -np.expm1(surest)
        expected = np.bincount(sites, weights=some)[sites]
        made[13], made[14] = known, seen
        for number, row in enumerate(self._by_memory(shown.numbers, share), 15):
            made[number] = row
        lately = np.bincount(sites, weights=of[_MEANS][1])[sites]
        made[25] = lately / sizes
        odds = (1, 2, 3, 4, 8, 9, 10, 15, 18, 25)
        chances = np.clip(made[odds, :], 1e-4, 1 - 1e-4)
        made[odds, :] = np.log(chances) - np.log1p(-chances)
        made[5], made[6], made[7] = of[_LAST], of[_BEFORE], np.log1p(of[_SINCE])
        made[11] = np.log1p(expected)
        made[12] = made[9] - np.bincount(sites, weights=made[9])[sites] / sizes
        made[20] = np.log1p(elements)
        made[21] = np.log1p(elements) - np.log1p(self._latest if steps else elements)
        made[22] = np.log1p(elements) - np.log1p(self._usual)
        made[23] = np.log1p(np.bincount(sites, weights=of[_LAST])[sites])
        made[24] = np.log1p(lately)
        made[26] = made[24] - made[11]
        made[27] = self._ranks(made[9])
        made[28] = self._ranks(of[_MEANS][2] + 1e-3 * share)
        made[29] = self.always
        made[CODE] = self._code
        return made

    def _ranks(self, values: Floats) -> npt.NDArray[np.float64]:
        """Return the rank of each slot within its site, 0 to 1."""
        order = np.lexsort((values, self.sites))
        rank = np.empty(len(values))
        rank[order] = np.arange(len(values)) - self._starts[self.sites[order]]
        return np.asarray((rank + 0.5) / self._sizes)

    def _by_codes(self, shown: Shown) -> tuple[Floats, Floats, float, float]:
        """Return log P(no element runs it), log(1 - P) of the likeliest element, the share of the
        elements whose codes are known, and how often these were seen."""
        if not len(shown.rows):
            nothing = np.zeros(len(self.slots), np.float32)
            return nothing, nothing, 0.0, 0.0
        table, total = self._table[shown.rows], float(shown.counts.sum())
        known = float(shown.counts[shown.rows > 0].sum()) / total
        seen = float(shown.counts @ np.log1p(self._weights[shown.rows])) / total
        return shown.counts @ table, table.min(axis=0), known, seen

    def _by_memory(self, numbers: Floats, share: Floats) -> Sequence[Any]:
        """Return the presence of each slot in the steps with similar numbers and in the nearest,
        its distance, the presence by the number that predicts best, and how many steps share it."""
        count = self._remembered
        if not count:
            return share, self.statistics[_LAST], 3.0, share, 0.0
        known, present = self._numbers[:count], self._present[:count]
        deviation = known.std(axis=0) + 1e-3
        apart = np.abs(known - numbers)
        distance = (apart / deviation).sum(axis=1)
        age = (self.steps - 1 - np.arange(count)) % MEMORY
        rated = distance + 1e-4 * age
        most = min(NEIGHBOURS, count)
        near = np.argpartition(rated, most - 1)[:most]
        weight = np.exp(-(distance[near] - distance[near].min()) / (0.5 * len(numbers)))
        alike = (weight / weight.sum()).astype(np.float32) @ present[near]
        nearest = int(rated.argmin())
        best = int(self._losses.argmin()) if self.steps > 2 else 0
        kernel = np.exp(-apart[:, best] / (_WIDTH * deviation[best])).astype(np.float32)
        total = float(kernel.sum())
        by_number = (kernel @ present + share) / (total + 1)
        return (
            0.02 + 0.96 * alike,
            present[nearest],
            np.log1p(distance[nearest]),
            by_number,
            np.log1p(total),
        )

    def observe(self, shown: Shown, ran: Bools) -> None:
        """Learn from a step: what its sample showed, and which slots ran, ``[slots]``."""
        self._compare_numbers(shown.numbers, ran)
        self._learn_codes(shown, ran)
        of, now = self.statistics, ran.astype(np.float32)
        of[_COUNT] += now
        of[_MEANS] += _RATES * (now - of[_MEANS])
        if self.steps:
            pairs = of[_PAIRS].reshape(2, 2, -1)  # by the last step, then by this one
            pairs *= _PAIRS_KEPT
            np.add.at(pairs, (of[_LAST].astype(int), ran.astype(int), np.arange(len(ran))), 1)
        of[_BEFORE], of[_LAST] = of[_LAST], now
        of[_SINCE] = np.where(ran, 0, np.minimum(of[_SINCE] + 1, _LONG))
        place = self.steps % MEMORY
        self._numbers[place], self._present[place] = shown.numbers, ran
        self._hashes[place] = shown.hashes
        self.steps += 1
        self._latest = float(shown.size)
        self._usual += (self._latest - self._usual) / min(self.steps, 20)

    def _compare_numbers(self, numbers: Floats, ran: Bools) -> None:
        """Update the loss of each number as the only predictor of what runs."""
        count = self._remembered
        if not count or self.steps >= _ADAPTING or not len(ran):
            return
        known = self._numbers[:count]
        width = _WIDTH * (known.std(axis=0) + 1e-3)
        kernel = np.exp(-np.abs(known - numbers) / width).astype(np.float32)
        share = (self.statistics[_COUNT] + 0.5) / (self.steps + 1)
        chance = (kernel.T @ self._present[:count] + share) / (kernel.sum(axis=0)[:, None] + 1)
        chance = np.clip(np.where(ran, chance, 1 - chance), 0.02, 0.98)
        rate = max(0.1, 1 / (self.steps + 1))
        self._losses += np.float32(rate) * (-np.log(chance).mean(axis=1) - self._losses)

    def _learn_codes(self, shown: Shown, ran: Bools) -> None:
        """Update the rows of a sample's n-grams; see [Note: tables]."""
        if not shown.hashes.size or not len(ran):
            return
        self._enter(shown.hashes)
        for order in range(len(shown.hashes)):
            rows, counts = self._rows(shown.hashes[: order + 1])
            table = self._table[rows]
            some = np.maximum(-np.expm1(counts @ table), _SMALL)
            own = np.flatnonzero(self._orders[rows] == order)
            rows, counts, chance = rows[own], counts[own], -np.expm1(table[own])
            share = chance * np.where(ran, 1 / some, 0).astype(np.float32)  # of one element
            self._weights[rows] += counts
            rate = counts / (self._weights[rows] + _STRENGTH[order])
            rate = np.maximum(rate, np.minimum(1, _LEAST_RATE * counts))[:, None]
            self._table[rows] = np.log1p(-np.clip(chance + rate * (share - chance), _SMALL, _MOST))

    def _enter(self, hashes: Codes) -> None:
        """Give rows to n-grams that were seen often enough, as far as there is room."""
        most = self._most_rows
        for order, codes in enumerate(hashes.tolist()):
            waiting = self._waiting[order]
            for code, place in {code: place for place, code in enumerate(codes)}.items():
                if code in self._book:
                    continue
                waiting[code] += 1
                if waiting[code] < LEAST[order] or len(self._book) + 1 >= most:
                    continue
                del waiting[code]
                row = len(self._book) + 1
                if row == len(self._table):
                    self._table = np.concatenate((self._table, np.zeros_like(self._table)))
                    self._weights = np.concatenate((self._weights, np.zeros_like(self._weights)))
                    more = np.zeros_like(self._orders)
                    self._orders = np.concatenate((self._orders, more))
                    self._shorter = np.concatenate((self._shorter, more))
                shorter = self._book.get(int(hashes[order - 1, place]), 0) if order else 0
                self._table[row] = self._table[shorter]
                self._weights[row], self._orders[row], self._shorter[row] = 0, order, shorter
                self._book[code] = row
            if len(waiting) > 4 * MAX_ROWS:
                waiting.clear()

    def refit(self) -> None:
        """Fit the tables again to the steps in memory, shorter n-grams first; see [Note: tables].
        Nothing is done while the codes of some are not known, as after loading."""
        steps = np.arange(self._remembered)
        hashes = [one for one in self._hashes[: len(steps)] if one is not None]
        if not len(self.slots) or len(hashes) < len(steps):
            return
        ran = self._present[steps]
        age = (self.steps - 1 - steps) % MEMORY
        weight = (_KEPT**age).astype(np.float32)
        share = np.clip((weight @ ran + 0.5) / (weight.sum() + 1), 1e-4, 1 - 1e-4)
        for order in range(ORDERS):
            counts = np.zeros((len(steps), len(self._book) + 1), np.float32)
            for place, codes in enumerate(hashes):
                rows, each = self._rows(codes[: order + 1])
                counts[place, rows] = each
            used = np.flatnonzero(counts.any(axis=0))
            own = np.flatnonzero(self._orders[used] == order)
            counts = counts[:, used]
            chance = -np.expm1(self._table[used])
            usual = -np.expm1(np.log1p(-share) / max(1.0, float(counts.sum(axis=1).mean())))
            shorter = -np.expm1(self._table[self._shorter[used[own]]])
            prior = _STRENGTH[order] * (shorter if order else usual)
            weighted = (counts[:, own] * weight[:, None]).T
            total = weighted.sum(axis=1)
            for _ in range(_ROUNDS):
                some = np.maximum(-np.expm1(counts @ np.log1p(-chance)), _SMALL)
                each = np.where(ran, 1 / some, 0).astype(np.float32)
                fitted = (chance[own] * (weighted @ each) + prior) / (
                    total[:, None] + _STRENGTH[order]
                )
                chance[own] = np.clip(fitted, _SMALL, _MOST)
            self._table[used[own]] = np.log1p(-chance[own])
            self._weights[used[own]] = total

    def nested(self) -> npt.NDArray[np.int64]:
        """Return the number of each slot's chain, ``[slots]``: slots of which each ran only if the
        one before it, of those that vary, ran too."""
        present = self._present[: self._remembered]
        chain = np.arange(len(self.slots))
        ran = present.sum(axis=0)
        often = np.minimum(ran, len(present) - ran) >= _NESTED
        for before, slot in pairwise(np.flatnonzero(often)):
            if not (present[:, slot] & ~present[:, before]).any():
                chain[slot] = chain[before]
        return chain

    def round(self) -> None:
        """Round the tables to the precision in which they are stored."""
        self._table = self._table.astype(np.float16).astype(np.float32)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store; the memory of codes is left out."""
        rows, count = len(self._book) + 1, self._remembered
        return {
            "statistics": self.statistics,
            "table": self._table[:rows].astype(np.float16),
            "weights": self._weights[:rows],
            "book": np.array([*self._book], np.int64),
            "orders": self._orders[:rows].astype(np.uint8),
            "shorter": self._shorter[:rows].astype(np.int32),
            "numbers": self._numbers[:count],
            "present": self._present[:count].astype(np.uint8),
            "losses": self._losses,
        }

    def document(self) -> dict[str, Any]:
        """Return what is stored beside the arrays, as plain JSON data."""
        return {
            "names": [*self._names],
            "steps": self.steps,
            "usual": self._usual,
            "latest": self._latest,
        }

    @classmethod
    def load(
        cls,
        blocks: Sequence[Block],
        slots: Sequence[Slot],
        document: Any,
        arrays: Mapping[str, npt.NDArray[Any]],
    ) -> Evidence:
        """Build evidence from its stored form.

        Raises:
            ValueError, KeyError, TypeError: if the parts are not evidence of these slots.
        """
        made = cls(blocks)
        made.place(slots)
        names = [str(name) for name in document["names"]]
        made.steps = int(document["steps"])
        counted = made._usual, made._latest = float(document["usual"]), float(document["latest"])
        if not all(0 <= number <= MOST for number in (made.steps, *counted)):
            raise ValueError("impossible numbers of steps or elements")
        if len(set(names)) != len(names) or len(names) > MAX_NUMBERS:
            raise ValueError("impossible names of numbers")
        made._names = {name: number for number, name in enumerate(names, 1)}
        count, book = made._remembered, arrays["book"]
        if book.dtype != np.int64 or book.ndim != 1 or len(book) >= MAX_ROWS:
            raise ValueError("a book of the wrong shape")
        made._book = {code: row for row, code in enumerate(book.tolist(), 1)}
        rows = len(book) + 1
        if len(made._book) != len(book) or rows > made._most_rows:
            raise ValueError("a book that names an n-gram twice, or too many")
        expected = {
            "statistics": (STATISTICS, len(slots)),
            "table": (rows, len(slots)),
            "weights": (rows,),
            "orders": (rows,),
            "shorter": (rows,),
            "numbers": (count, len(names) + 1),
            "present": (count, len(slots)),
            "losses": (len(names) + 1,),
        }
        found = {}
        for name, shape in expected.items():
            array = np.asarray(arrays[name])
            if array.shape != shape or array.dtype.kind not in ("i" if name == "shorter" else "fu"):
                raise ValueError(f"{name} of the wrong shape or type")
            if not (np.abs(array.astype(np.float64)) <= MOST).all():
                raise ValueError(f"{name} that are not finite, or too large")
            found[name] = array.astype(np.float32)
        if (found["table"] > 0).any() or (found["table"] < _SUREST).any():
            raise ValueError("a table of impossible chances")
        if (found["weights"] < 0).any() or (found["statistics"][:BIAS] < 0).any():
            raise ValueError("statistics below zero")
        if (found["statistics"][[*range(1, 6)]] > 1).any():
            raise ValueError("shares above one")
        shorter = found["shorter"].astype(np.int64)
        if not ((shorter >= 0) & (shorter < np.maximum(np.arange(rows), 1))).all():
            raise ValueError("an n-gram without its shorter one")
        made.statistics, made._losses = found["statistics"], found["losses"]
        made._table, made._weights = found["table"], found["weights"]
        made._orders = found["orders"].astype(np.int64)
        made._shorter = shorter
        made._numbers = np.zeros((MEMORY, len(names) + 1), np.float32)
        made._numbers[:count] = found["numbers"]
        made._present[:count] = found["present"] > 0
        return made
