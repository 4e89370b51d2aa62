"""Boosted trees as lookup tables, evaluated by numpy, bit for bit as LightGBM evaluates them.

Each leaf of a tree is one bit of a 16-bit mask. For each column the thresholds of all trees cut the
values into bins, and a table holds the leaves that remain reachable for each bin. The masks of all
columns are combined by AND; the lowest remaining bit is the leaf.

Source: Lucchese et al., "QuickScorer: a fast algorithm to rank documents with additive ensembles of
regression trees", SIGIR 2015.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.features import Floats

Masks = npt.NDArray[np.uint16]

MAX_TREES = 64
MAX_LEAVES = 16
"""The most leaves of a tree: the bits of a mask."""
LARGEST_LEAF = 1e6
"""The largest magnitude of a leaf's value; limited because leaves are summed."""

_EVERY = np.uint16(0xFFFF)
_LOWEST_BIT = np.zeros(1 << MAX_LEAVES, dtype=np.int64)
for _bit in reversed(range(MAX_LEAVES)):
    _LOWEST_BIT[1 << _bit :: 1 << (_bit + 1)] = _bit


@dataclass(frozen=True)
class Trees:
    """An ensemble of binary trees over float32 columns.

    Attributes:
        bins: for each column used by a split, the thresholds, ascending float32 ``[edges]``, and
            masks of the leaves reachable below, between and above them, ``[edges + 1, trees]``.
        value: value of each leaf, float64 ``[trees, MAX_LEAVES]``.
    """

    bins: Mapping[int, tuple[Floats, Masks]]
    value: npt.NDArray[np.float64]

    def every_leaf(self, rows: int) -> Masks:
        """Return masks with all leaves reachable, ``[rows, trees]``."""
        return np.full((rows, len(self.value)), _EVERY)

    def leaves(self, column: int, values: Floats) -> Masks:
        """Return masks of the leaves reachable with a column's values, ``[values, trees]``."""
        edges, table = self.bins[column]
        return table[np.searchsorted(edges, values)]

    def score(self, masks: Masks) -> npt.NDArray[np.float64]:
        """Return the sum of the trees' leaves, ``[rows]``, for masks that include all columns."""
        found = self.value[np.arange(len(self.value)), _LOWEST_BIT[masks]]
        # Sum tree by tree, as LightGBM does: a pairwise sum would round differently.
        return np.asarray(np.cumsum(found, axis=1)[:, -1])

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store."""
        edges, tables = zip(*self.bins.values(), strict=True) if self.bins else ((), ())
        nothing = np.zeros((0, len(self.value)), dtype=np.uint16)
        return {
            "tree_columns": np.array([*self.bins], dtype=np.int64),
            "tree_edges": np.array([len(each) for each in edges], dtype=np.int64),
            "tree_thresholds": np.concatenate([np.zeros(0, dtype=np.float32), *edges]),
            "tree_masks": np.concatenate([nothing, *tables]).view(np.int16),
            "tree_values": self.value,
        }

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]], columns: int) -> Trees:
        """Build trees from their stored form.

        Raises:
            ValueError, KeyError: if the parts are not trees over ``columns`` columns.
        """
        types = {"columns": "i8", "edges": "i8", "thresholds": "f4", "masks": "i2", "values": "f8"}
        named = {name: arrays[f"tree_{name}"] for name in types}
        dimensions = [array.ndim for array in named.values()]
        if [array.dtype.str[1:] for array in named.values()] != [*types.values()]:
            raise ValueError("trees of other types")
        used, edges, thresholds, masks, value = named.values()
        trees = len(value)
        if dimensions != [1, 1, 1, 2, 2] or not 0 < trees <= MAX_TREES:
            raise ValueError("no trees, or too many")
        counted = ((edges > 0) & (edges <= len(thresholds))).all()  # so that no sum overflows
        if len(used) != len(edges) or not counted or edges.sum() != len(thresholds):
            raise ValueError("trees with thresholds missing")
        if masks.shape != (len(thresholds) + len(used), trees) or value.shape[1] != MAX_LEAVES:
            raise ValueError("trees with leaves missing")
        if not ((used >= 0) & (used < columns)).all() or (np.diff(used) <= 0).any():
            raise ValueError("a split on a column that does not exist")
        if not (np.isfinite(thresholds).all() and (np.abs(value) <= LARGEST_LEAF).all()):
            raise ValueError("a threshold or leaf that is not finite, or too large")
        starts = np.cumsum(edges)
        ascends = np.diff(thresholds) > 0
        ascends[starts[:-1] - 1] = True  # from one column to the next
        if not ascends.all():
            raise ValueError("thresholds in no order")
        stops = pairwise([0, *starts.tolist()])
        return cls(
            {
                column: (
                    thresholds[start:stop],
                    masks[start + number : stop + number + 1].view(np.uint16),
                )
                for number, (column, (start, stop)) in enumerate(
                    zip(used.tolist(), stops, strict=True)
                )
            },
            value,
        )

    @classmethod
    def of_booster(cls, booster: Any) -> Trees:
        """Convert a `lightgbm.Booster` of numerical splits, trained without missing values."""
        dumped = booster.dump_model()["tree_info"]
        value = np.zeros((len(dumped), MAX_LEAVES))
        splits: defaultdict[int, list[tuple[np.float32, int, int, int]]] = defaultdict(list)

        def leaves_of(tree: int, node: dict[str, Any]) -> int:
            if "split_index" not in node:
                leaf: int = node.get("leaf_index", 0)
                value[tree, leaf] = node["leaf_value"]
                return 1 << leaf
            assert (node["decision_type"], node["missing_type"]) == ("<=", "None")
            left, right = (leaves_of(tree, node[f"{side}_child"]) for side in ("left", "right"))
            split = (_as_float32(node["threshold"]), tree, left, right)
            splits[node["split_feature"]].append(split)
            return left | right

        for number, tree in enumerate(dumped):
            leaves_of(number, tree["tree_structure"])
        bins = {}
        for column, found in sorted(splits.items()):
            edges = np.unique(np.array([split[0] for split in found], dtype=np.float32))
            table = np.full((len(edges) + 1, len(dumped)), _EVERY)
            for threshold, number, left, right in found:
                # Bin i holds values above edge i - 1 and up to edge i.
                up_to = int(np.searchsorted(edges, threshold)) + 1
                table[:up_to, number] &= _EVERY ^ np.uint16(right)
                table[up_to:, number] &= _EVERY ^ np.uint16(left)
            bins[column] = (edges, table)
        return cls(bins, value)


def _as_float32(threshold: float) -> np.float32:
    """Return the largest float32 up to ``threshold``, which splits float32 values alike.

    Not those of magnitude below 1e-35, which LightGBM takes for 0.
    """
    most = np.finfo(np.float32).max
    near = np.float32(np.clip(threshold, -most, most))
    return near if float(near) <= threshold else np.nextafter(near, np.float32(-np.inf))
