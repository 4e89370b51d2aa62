"""Loops: runs of blocks driven by the sample's elements, one element after the other.

`LoopModel` learns how the elements determine a loop's blocks: how many blocks an element runs
(solved in whole numbers from the lengths of the recorded runs), which of the element's codes decide
them, and which blocks each value of those codes gives. A Tree-LSTM's cells by arity, a cell per
token, a loop that skips some kinds of node: all are small tables. If no rule fits the records, the
most frequent run is predicted. Each loop slot of the `OrderTemplate` has one model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.codes import columns_of
from dynoffload.planning.blocks import Block
from dynoffload.profiler.input_features import InputFeatures

Codes = npt.NDArray[np.int64]
Run = tuple[int, ...]

EXPLAINED = 0.98
"""The share of training samples whose run length a rule must predict to be accepted."""
MAX_LENGTH_CODES = 512
"""The most distinct codes for which lengths are solved."""
MAX_RUN = 1 << 20
"""The longest run that is predicted."""
CLEAR = 0.9
"""The share of a column's codes that must be unambiguous for a rule to be completed."""
MAX_KEYS = 4096
"""The most keys of a completed rule."""


@dataclass(frozen=True)
class Rule:
    """Maps some of an element's codes to the blocks it runs.

    Attributes:
        columns: the columns of the elements that decide.
        table: the blocks run, by the values of those columns.
    """

    columns: tuple[int, ...]
    table: Mapping[tuple[int, ...], Run]

    @cached_property
    def keys(self) -> Codes:
        """The table's keys, ``[keys, columns]``; an unseen value uses the nearest key."""
        return np.array(sorted(self.table), np.int64).reshape(len(self.table), len(self.columns))

    def apply(self, codes: Codes) -> list[int]:
        """Return the blocks that elements with these codes ``[n, columns]`` run, in order."""
        result: list[int] = []
        table = self.table
        if max(self.columns, default=0) >= codes.shape[1]:
            return result  # elements of another width than in training, or none
        for key in map(tuple, codes[:, self.columns].tolist()):
            run = table.get(key)
            if run is None:
                far = np.abs(self.keys - np.array(key, dtype=np.int64)).astype(np.float64)
                agree = (far == 0).sum(axis=1)
                best = int(np.lexsort((far.sum(axis=1), -agree))[0])
                run = table[tuple(self.keys[best].tolist())]
            result.extend(run)
            if len(result) > MAX_RUN:
                return result[:MAX_RUN]
        return result


@dataclass(frozen=True)
class LoopModel:
    """Predicts the blocks of one loop of the template.

    Attributes:
        how: the rule found, or the most frequent recorded run.
        fidelity: share of the training runs that it predicts exactly.
    """

    how: Rule | Run
    fidelity: float

    def predict(self, sample: InputFeatures) -> list[int]:
        """Return the blocks of this loop for a sample, in order."""
        if isinstance(self.how, Rule):
            return self.how.apply(columns_of(sample.elements))
        return list(self.how)

    def to_json(self) -> dict[str, Any]:
        """Return the model as plain JSON data."""
        if not isinstance(self.how, Rule):
            return {"fidelity": self.fidelity, "run": list(self.how)}
        table = [[list(key), list(run)] for key, run in self.how.table.items()]
        return {"fidelity": self.fidelity, "columns": list(self.how.columns), "table": table}

    @classmethod
    def from_json(cls, data: Any, blocks: int) -> LoopModel:
        """Return the model that `to_json` wrote, for a vocabulary of ``blocks`` blocks.

        Raises:
            ValueError, LookupError, TypeError: if the data is not such a model.
        """
        fidelity = float(data["fidelity"])
        if not 0 <= fidelity <= 1:
            raise ValueError("a fidelity that is no share")
        if "columns" not in data:
            return cls(_run(data["run"], blocks), fidelity)
        table = {tuple(map(int, key)): _run(run, blocks) for key, run in data["table"]}
        columns = tuple(map(int, data["columns"]))
        if not table or not all(0 <= column < 64 for column in columns):
            raise ValueError("an empty rule")
        if any(len(key) != len(columns) for key in table):
            raise ValueError("a key of another length than the columns")
        return cls(Rule(columns, table), fidelity)


def learn_loop(
    samples: Sequence[InputFeatures], runs: Sequence[Run], blocks: Sequence[Block] = ()
) -> LoopModel:
    """Learn one loop from recorded samples.

    Args:
        samples: one per record.
        runs: the blocks that the loop ran; an empty tuple where it did not run.
        blocks: the vocabulary's blocks; rules are completed by their paths and variants.
    """
    codes = [columns_of(sample.elements) for sample in samples]
    if len({code.shape[1] for code in codes}) == 1 and sum(code.shape[0] for code in codes):
        lengths = _element_lengths(codes, np.array([len(run) for run in runs]))
        if lengths is not None:
            rule = _completed(_learn_rule(codes, runs, lengths), blocks)
            right = sum(rule.apply(c) == list(r) for c, r in zip(codes, runs, strict=True))
            return LoopModel(rule, right / len(runs))
    run, count = Counter(map(tuple, runs)).most_common(1)[0]
    return LoopModel(run, count / len(runs))


def _element_lengths(codes: list[Codes], lengths: Codes) -> list[Codes] | None:
    """Return how many blocks each element runs, or None if no rule fits.

    Tried in order: the same number for all; then, column by column, one whole number per code (the
    least-squares solution of "lengths = histogram of codes x blocks per code").
    """
    sizes = np.array([len(code) for code in codes])
    total = float(sizes.sum())
    same = round(float(lengths.sum()) / total)
    if same and np.mean(lengths == same * sizes) >= EXPLAINED:
        return [np.full(size, same) for size in sizes]
    for column in range(codes[0].shape[1]):
        values = np.unique(np.concatenate([code[:, column] for code in codes]))
        if values.size > MAX_LENGTH_CODES:
            continue
        places = [np.searchsorted(values, code[:, column]) for code in codes]
        histogram = np.stack([np.bincount(p, minlength=values.size) for p in places])
        system = histogram.astype(np.float64)
        solved = np.linalg.lstsq(system, lengths.astype(np.float64), rcond=None)[0]
        whole = np.maximum(np.rint(solved), 0).astype(np.int64)
        if np.mean(histogram @ whole == lengths) >= EXPLAINED:
            return [whole[p] for p in places]
    return None


def _learn_rule(codes: list[Codes], runs: Sequence[Run], lengths: list[Codes]) -> Rule:
    """Return the rule over the fewest columns that predicts as well as any."""
    keys: list[tuple[int, ...]] = []
    made: list[Run] = []
    for code, run, length in zip(codes, runs, lengths, strict=True):
        if int(length.sum()) != len(run):
            continue
        stops = np.cumsum(length).tolist()
        for key, start, stop in zip(code.tolist(), [0, *stops], stops, strict=False):
            keys.append(tuple(key))
            made.append(tuple(run[start:stop]))
    width = min(codes[0].shape[1], 6)
    best = -math.inf
    columns: tuple[int, ...] = ()
    votes = _votes(keys, made, columns)
    for size in range(1, min(width, 3) + 1):
        for chosen in combinations(range(width), size):
            tried = _votes(keys, made, chosen)
            score = sum(map(_left_out_hits, tried.values())) / max(len(keys), 1)
            if score > best + 1e-3:
                best, columns, votes = score, chosen, tried
        if best >= 1 - 1e-3:
            break
    table = {key: max(count, key=lambda r: (count[r], r)) for key, count in sorted(votes.items())}
    return Rule(columns, table)


def _completed(rule: Rule, blocks: Sequence[Block]) -> Rule:
    """Extend a rule over two columns to pairs of codes that were not seen together.

    One column determines which modules run, the other their variant. Ambiguous codes and pairs
    without a block are left out; unknown shapes use the block of the variant ``""``.
    """
    if len(rule.columns) != 2 or not blocks:
        return rule
    number = {(block.path, block.variant): block.index for block in blocks}
    shaped = {block.path for block in blocks if block.variant}
    table = dict(rule.table)
    for by_path, by_variant in ((0, 1), (1, 0)):
        paths: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        variants: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        exact: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        for key, run in rule.table.items():
            paths[key[by_path]].add(tuple(blocks[b].path for b in run))
            variants[key[by_variant]].add(tuple(blocks[b].variant for b in run))
            if all(blocks[b].variant or blocks[b].path not in shaped for b in run):
                exact[key[by_variant]].add(tuple(blocks[b].variant for b in run))
        variants |= exact  # a block for all other shapes does not determine the variant
        modules_of = {code: next(iter(seen)) for code, seen in paths.items() if len(seen) == 1}
        shapes = {code: next(iter(seen)) for code, seen in variants.items() if len(seen) == 1}
        if len(modules_of) < CLEAR * len(paths) or len(shapes) < CLEAR * len(variants):
            continue
        for code, which in modules_of.items():
            for other, how in shapes.items():
                key = (code, other) if by_path == 0 else (other, code)
                made = [
                    number.get((path, variant), number.get((path, ""), -1))
                    for path, variant in zip(which, how, strict=False)
                ]
                if len(which) == len(how) and min(made, default=-1) >= 0 and len(table) < MAX_KEYS:
                    table.setdefault(key, tuple(made))
        break
    return Rule(rule.columns, table)


def _votes(
    keys: list[tuple[int, ...]], made: list[Run], columns: tuple[int, ...]
) -> dict[tuple[int, ...], Counter[Run]]:
    """Count the runs of the elements, by some columns of their keys."""
    votes: dict[tuple[int, ...], Counter[Run]] = defaultdict(Counter)
    for key, run in zip(keys, made, strict=True):
        votes[tuple(key[c] for c in columns)][run] += 1
    return votes


def _left_out_hits(count: Counter[Run]) -> int:
    """Return how many elements with one key are predicted by the others (leave-one-out)."""
    (_, most), (_, second) = (*count.most_common(2), ((), 0))[:2]
    return most if most > second + 1 else 0


def _run(values: Any, blocks: int) -> Run:
    run = tuple(map(int, values))
    if not all(0 <= block < blocks for block in run):
        raise ValueError("a block outside the vocabulary")
    return run
