"""The boosted model: LightGBM trees stacked on the association tables.

`BoostedTables` predicts, for each sample and block, whether the block runs. Its inputs are the
noisy-or estimates of `dynoffload.pilot.association`, their difference from the other blocks of the
site, the sample's numbers and the block's features. One ensemble serves all blocks, including rare
ones.

The tables of a training sample are fitted on other sources than its own (cross-fitting), so that
the trees do not learn to trust memorised entries. LightGBM trains; `dynoffload.pilot.trees`
predicts. Source: Ke et al., "LightGBM", NeurIPS 2017; Wolpert, "Stacked generalization", 1992.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.association import ORDERS, Association, learn_association
from dynoffload.pilot.features import MAX_VALUES, Floats, numbers_of, varying_numbers
from dynoffload.pilot.sources import source_folds
from dynoffload.pilot.trees import Masks, Trees
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.safefile import checked_integers, checked_weights

Bools = npt.NDArray[np.bool_]

ROUNDS = 24
"""The most trees: with 400 blocks, they take 0.1 ms per prediction."""
LEAVES = 15
FOLDS = 3
MAX_ROWS = 300_000
"""The most (sample, block) rows that the trees are trained on."""
PRIOR = 2
"""The evidence column that depends on the block alone."""
EVIDENCE = 5
"""Number of evidence columns; see `evidence`."""


@dataclass(frozen=True)
class TrainingSet:
    """Training data of a model.

    Attributes:
        samples: one per step.
        present: which optional block ran in which step, ``[steps, blocks]``.
        groups: the source of each step.
        described: the blocks' features, ``[blocks, features]``.
        sites: the number of each block's site, ``[blocks]``.
    """

    samples: Sequence[InputFeatures]
    present: Bools
    groups: Sequence[str]
    described: Floats
    sites: npt.NDArray[np.int64]

    def part(self, steps: npt.NDArray[np.int64]) -> TrainingSet:
        """Return the training set of the given steps."""
        return replace(
            self,
            samples=[self.samples[i] for i in steps],
            present=self.present[steps],
            groups=[self.groups[i] for i in steps],
        )


@dataclass(frozen=True)
class BoostedTables:
    """Association tables and the trees that use them.

    The trees' columns are the evidence, then the blocks' features, then the sample's numbers.

    Attributes:
        association: the tables.
        prior: log-odds that a block runs, independent of the sample, ``[blocks]``.
        described: the blocks' features, ``[blocks, features]``.
        sites: the number of each block's site, ``[blocks]``.
        names: names of the sample's numbers, in addition to its number of elements.
        trees: the ensemble; it returns log-odds.
    """

    association: Association
    prior: Floats
    described: Floats
    sites: npt.NDArray[np.int64]
    names: tuple[str, ...]
    trees: Trees

    @cached_property
    def _by_block(self) -> Masks:
        """Leaf masks after applying the columns that do not depend on the sample."""
        masks = self.trees.every_leaf(len(self.prior))
        self._narrow(masks, {PRIOR: self.prior, **dict(enumerate(self.described.T, EVIDENCE))})
        return masks

    def probabilities(self, sample: InputFeatures) -> Floats:
        """Return P(the block runs) for each optional block, ``[blocks]``."""
        masks = self._by_block.copy()
        shown = evidence(self.association, self.prior, self.sites, sample)
        columns = {number: column for number, column in enumerate(shown) if number != PRIOR}
        self._narrow(masks, columns)
        first = EVIDENCE + self.described.shape[1]
        self._narrow(masks, dict(enumerate(numbers_of(sample, self.names)[:, None], first)))
        odds = self.trees.score(masks)
        return np.asarray(1 / (1 + np.exp(-np.clip(odds, -30, 30))), dtype=np.float32)

    def _narrow(self, masks: Masks, columns: Mapping[int, Floats]) -> None:
        """Remove from ``masks`` the leaves that these columns' values rule out."""
        for number, column in columns.items():
            if number in self.trees.bins:
                masks &= self.trees.leaves(number, column)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store: tables as float16, trees unchanged."""
        return {
            **{f"book{i}": book for i, book in enumerate(self.association.books)},
            **self.trees.arrays(),
            "table": self.association.table.astype(np.float16),
            "prior": self.prior,
            "described": self.described,
            "sites": self.sites,
        }

    def document(self) -> dict[str, Any]:
        """Return what is stored in addition to the arrays, as plain JSON data."""
        return {"names": list(self.names), "books": len(self.association.books)}

    @classmethod
    def load(
        cls, document: Any, arrays: Mapping[str, npt.NDArray[Any]], blocks: int
    ) -> BoostedTables:
        """Build the model from its stored form.

        Raises:
            ValueError, KeyError, TypeError: if the parts are not a model of this number of
            blocks.
        """
        count = int(document["books"])
        if not 0 <= count <= ORDERS:
            raise ValueError("the wrong number of code books")
        books = tuple(checked_integers("book", arrays[f"book{i}"]) for i in range(count))
        if not all(book.ndim == 1 and (book[1:] > book[:-1]).all() for book in books):
            raise ValueError("a code book that is not ascending")
        table = checked_weights("table", arrays["table"])
        prior = checked_weights("prior", arrays["prior"])
        described = checked_weights("described", arrays["described"])
        sites = checked_integers("sites", arrays["sites"])
        names = tuple(map(str, document["names"]))
        if len(names) > MAX_VALUES:
            raise ValueError("too many names of numbers")
        rows = 1 + sum(map(len, books))
        if table.shape != (rows, blocks) or prior.shape != (blocks,) or sites.shape != (blocks,):
            raise ValueError("tables of the wrong shape")
        if described.ndim != 2 or len(described) != blocks:
            raise ValueError("block features of the wrong shape")
        if (table > 0).any():
            raise ValueError("a table of chances above 1")
        if blocks and not (sites.min() >= 0 and sites.max() < blocks):
            raise ValueError("a site that does not exist")
        trees = Trees.load(arrays, EVIDENCE + described.shape[1] + 1 + len(names))
        return cls(Association(books, table), prior, described, sites, names, trees)


def evidence(
    association: Association, prior: Floats, sites: npt.NDArray[np.int64], sample: InputFeatures
) -> Floats:
    """Return the tables' evidence on each block for a sample, ``[EVIDENCE, blocks]``.

    Rows: log-odds of the noisy-or, log-odds of the likeliest element alone, prior log-odds, the
    expected number of running blocks of the site, and the noisy-or log-odds minus the site's mean.
    """
    silent, surest = association.evidence(sample)
    odds = _log_odds(silent)
    expected = np.bincount(sites, weights=-np.expm1(silent))
    mean = np.bincount(sites, weights=odds) / np.maximum(np.bincount(sites), 1)
    rows = np.empty((EVIDENCE, len(prior)), dtype=np.float32)
    rows[0] = odds
    rows[1] = _log_odds(surest)
    rows[PRIOR] = prior
    rows[3] = expected[sites]
    rows[4] = odds - mean[sites]
    return rows


def train_tables(data: TrainingSet, seed: int) -> BoostedTables:
    """Fit the tables and the trees; ``seed`` seeds the folds, the row sampling and the trees."""
    import lightgbm

    samples, present = data.samples, data.present
    rng = np.random.default_rng(seed)
    names = varying_numbers(samples)
    folds = source_folds(data.groups, FOLDS, seed)
    take = np.ones(present.shape, dtype=np.bool_)
    if present.size > MAX_ROWS:
        take = rng.random(present.shape) < MAX_ROWS / present.size
    inputs: list[Floats] = []
    labels: list[Bools] = []
    for fold in np.unique(folds):
        inside = np.flatnonzero(folds != fold)
        others = data.part(inside) if len(inside) else data
        association = learn_association(others.samples, others.present)
        prior = _prior(others.present)
        for i in np.flatnonzero(folds == fold).tolist():
            shown = evidence(association, prior, data.sites, samples[i]).T
            numbers = np.tile(numbers_of(samples[i], names), (len(shown), 1))
            inputs.append(np.concatenate((shown, data.described, numbers), axis=1)[take[i]])
            labels.append(present[i][take[i]])
    rows = lightgbm.Dataset(np.concatenate(inputs), np.concatenate(labels).astype(np.float32))
    settings = {
        "objective": "binary",
        "num_leaves": LEAVES,
        "learning_rate": 0.2,
        "min_data_in_leaf": 20,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
    trees = Trees.of_booster(lightgbm.train(settings, rows, ROUNDS))
    association = learn_association(samples, present)
    # Round to the stored precision, so that a loaded pilot predicts the same.
    table = association.table.astype(np.float16).astype(np.float32)
    association = replace(association, table=table)
    prior = _prior(present)
    return BoostedTables(association, prior, data.described, data.sites, names, trees)


def _prior(present: Bools) -> Floats:
    share = (present.sum(axis=0) + 0.5) / (len(present) + 1.0)
    return np.asarray(np.log(share / (1 - share)), dtype=np.float32)


def _log_odds(silent: Floats) -> Floats:
    """Return log(P / (1 - P)) where ``silent`` is log(1 - P)."""
    return np.asarray(np.log(np.maximum(-np.expm1(silent), 1e-7)) - silent, dtype=np.float32)
