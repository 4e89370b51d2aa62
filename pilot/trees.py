"""Boosted trees as plain arrays, evaluated by numpy as LightGBM evaluates them, bit for bit.

A split sends a row left if its value is at most the threshold. Each leaf of a tree is one bit of a
16-bit mask. For each column the thresholds of all trees cut the numbers into bins, and a table
holds which leaves a value of each bin leaves possible: a look-up per column, joined by AND, leaves
one bit per tree.

Source: Lucchese et al., "QuickScorer: a fast algorithm to rank documents with additive ensembles of
regression trees", SIGIR 2015 (leaves as bits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.features import Floats

Masks = npt.NDArray[np.uint16]
Integers = npt.NDArray[np.int64]

MAX_TREES = 64
MAX_LEAVES = 16
"""The most leaves of a tree: the bits of a mask."""
LARGEST_LEAF = 1e6
"""The largest value of a leaf: leaves are summed."""

_EVERY = np.uint16(0xFFFF)
_ZERO = np.float32(1e-35)  # LightGBM's kZeroThreshold
_LEAF_OF_BIT = np.zeros(1 << MAX_LEAVES, dtype=np.int64)
_LEAF_OF_BIT[1 << np.arange(MAX_LEAVES)] = np.arange(MAX_LEAVES)


@dataclass(frozen=True)
class Trees:
    """An ensemble of binary trees over float32 columns.

    The splits of all trees stand one after the other, as do their leaves. A child from 0 on is the
    number of a split within its tree; a negative one, ``~leaf``, is a leaf's.

    Attributes:
        splits: how many splits each tree has, int64 ``[trees]``; its leaves are one more.
        feature: the column of each split, int64 ``[splits]``.
        threshold: of each split, float32 ``[splits]``.
        left: the child of values up to the threshold, int64 ``[splits]``.
        right: the child of larger values, int64 ``[splits]``.
        value: of each leaf, float64 ``[leaves]``.
    """

    splits: Integers
    feature: Integers
    threshold: Floats
    left: Integers
    right: Integers
    value: npt.NDArray[np.float64]
    _bins: Mapping[int, tuple[Floats, Masks]] = field(init=False, repr=False, compare=False)
    _first_leaf: Integers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Tabulate which leaves are possible, by column and bin."""
        gone_left, gone_right = self._masks_of_splits()
        tree_of = np.repeat(np.arange(len(self.splits)), self.splits)
        bins: dict[int, tuple[Floats, Masks]] = {}
        for column in np.unique(self.feature).tolist():
            at = np.flatnonzero(self.feature == column)
            edges = np.unique(self.threshold[at])
            table = np.full((len(edges) + 1, len(self.splits)), _EVERY)
            for split in at.tolist():
                # Bin i holds values above edge i - 1 and up to edge i.
                up_to = int(np.searchsorted(edges, self.threshold[split])) + 1
                table[:up_to, tree_of[split]] &= gone_left[split]
                table[up_to:, tree_of[split]] &= gone_right[split]
            bins[column] = (edges, table)
        object.__setattr__(self, "_bins", bins)
        object.__setattr__(self, "_first_leaf", np.cumsum(self.splits + 1) - (self.splits + 1))

    @property
    def columns(self) -> frozenset[int]:
        """The columns that any split looks at."""
        return frozenset(self._bins)

    def every_leaf(self, rows: int) -> Masks:
        """Return masks before any column is known, ``[rows, trees]``."""
        masks = np.empty((rows, len(self.splits)), dtype=np.uint16)
        masks[:] = (1 << (self.splits + 1)) - 1
        return masks

    def leaves(self, column: int, values: Floats) -> Masks:
        """Return which leaves a column's values leave possible, ``[values, trees]``."""
        edges, table = self._bins[column]
        return table[np.searchsorted(edges, values)]

    def score(self, masks: Masks) -> npt.NDArray[np.float64]:
        """Return the sum of the trees' leaves, ``[rows]``, once all columns are in the masks."""
        found = self.value[_LEAF_OF_BIT[masks] + self._first_leaf]
        # Tree after tree, as LightGBM adds: a pairwise sum would round otherwise.
        return np.asarray(np.cumsum(found, axis=1)[:, -1])

    def predict(self, rows: Floats) -> npt.NDArray[np.float64]:
        """Return the score of each row, ``[rows]``, of a matrix ``[rows, columns]``."""
        masks = self.every_leaf(len(rows))
        for column in self.columns:
            masks &= self.leaves(column, rows[:, column])
        return self.score(masks)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what is stored."""
        return {
            "tree_splits": self.splits,
            "tree_feature": self.feature,
            "tree_threshold": self.threshold,
            "tree_left": self.left,
            "tree_right": self.right,
            "tree_value": self.value,
        }

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]], columns: int) -> Trees:
        """Build trees from what was stored.

        Raises:
            ValueError, KeyError: if the parts are not trees over so many columns.
        """
        splits, feature, left, right = (
            _vector(arrays, f"tree_{name}", np.int64)
            for name in ("splits", "feature", "left", "right")
        )
        threshold = _vector(arrays, "tree_threshold", np.float32)
        value = _vector(arrays, "tree_value", np.float64)
        if not 0 < len(splits) <= MAX_TREES:
            raise ValueError("no trees, or too many")
        if not ((splits >= 0) & (splits < MAX_LEAVES)).all():
            raise ValueError("a tree of an impossible size")
        count = int(splits.sum())
        if not all(len(part) == count for part in (feature, threshold, left, right)):
            raise ValueError("trees with splits missing")
        if len(value) != count + len(splits):
            raise ValueError("trees with leaves missing")
        if not ((feature >= 0) & (feature < columns)).all():
            raise ValueError("a split on a column that does not exist")
        if not (np.isfinite(threshold).all() and (np.abs(value) <= LARGEST_LEAF).all()):
            raise ValueError("a threshold or leaf that is not finite, or too large")
        start = 0
        for size in splits.tolist():
            _check_tree(left[start : start + size].tolist(), right[start : start + size].tolist())
            start += size
        return cls(splits, feature, threshold, left, right, value)

    @classmethod
    def of_booster(cls, booster: Any) -> Trees:
        """Convert a `lightgbm.Booster` of numerical splits, trained without missing values."""
        splits, leaves = [], []
        rows: list[tuple[int, float, int, int]] = []
        for tree in booster.dump_model()["tree_info"]:
            count = tree["num_leaves"]
            value = [0.0] * count
            nodes: dict[int, tuple[int, float, int, int]] = {}
            stack = [tree["tree_structure"]]
            while stack:
                node = stack.pop()
                if "split_index" not in node:
                    value[node.get("leaf_index", 0)] = node["leaf_value"]
                    continue
                assert (node["decision_type"], node["missing_type"]) == ("<=", "None")
                children = [node["left_child"], node["right_child"]]
                stack += children
                left, right = (c.get("split_index", ~c.get("leaf_index", 0)) for c in children)
                nodes[node["split_index"]] = (node["split_feature"], node["threshold"], left, right)
            splits.append(count - 1)
            rows += [nodes[number] for number in range(count - 1)]
            leaves += value
        feature, threshold, left_child, right_child = zip(*rows, strict=True) if rows else [()] * 4
        return cls(
            np.array(splits, dtype=np.int64),
            np.array(feature, dtype=np.int64),
            _as_float32(np.array(threshold, dtype=np.float64)),
            np.array(left_child, dtype=np.int64),
            np.array(right_child, dtype=np.int64),
            np.array(leaves, dtype=np.float64),
        )

    def _masks_of_splits(self) -> tuple[Masks, Masks]:
        """Return the leaves possible after going left at each split, and after going right."""
        gone_left = np.full(len(self.feature), _EVERY)
        gone_right = np.full(len(self.feature), _EVERY)
        start = 0
        for size in self.splits.tolist():
            below = [0] * size
            for split in reversed(range(size)):  # children stand after their parents
                sides = [
                    below[child] if child >= 0 else 1 << ~child
                    for child in (int(self.left[start + split]), int(self.right[start + split]))
                ]
                below[split] = sides[0] | sides[1]
                gone_left[start + split] = _EVERY ^ np.uint16(sides[1])
                gone_right[start + split] = _EVERY ^ np.uint16(sides[0])
            start += size
        return gone_left, gone_right


def _check_tree(left: list[int], right: list[int]) -> None:
    """Refuse children that do not form a tree in which splits stand after their parents."""
    splits = len(left)
    if sorted(left + right) != [*range(-splits - 1, 0), *range(1, splits)] and splits:
        raise ValueError("splits that do not form a tree")
    if any(0 <= child <= split for side in (left, right) for split, child in enumerate(side)):
        raise ValueError("splits that lead back")


def _as_float32(thresholds: npt.NDArray[np.float64]) -> Floats:
    """Return float32 thresholds that decide as LightGBM's do of every float32 value.

    Each is rounded down. LightGBM takes values up to `_ZERO` in size for 0, so a threshold among
    these stands above or below all of them.
    """
    most = np.finfo(np.float32).max
    near = np.clip(thresholds, -most, most).astype(np.float32)
    near = np.where(near > thresholds, np.nextafter(near, np.float32(-np.inf)), near)
    near = np.where((near >= 0) & (near < _ZERO), _ZERO, near)
    return np.where((near < 0) & (near >= -_ZERO), np.nextafter(-_ZERO, np.float32(-1)), near)


def _vector(arrays: Mapping[str, npt.NDArray[Any]], name: str, dtype: Any) -> npt.NDArray[Any]:
    array = arrays[name]
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{name} is not a vector of {np.dtype(dtype)}")
    return array
