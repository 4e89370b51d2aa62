"""The boosted pilot: LightGBM over what the association tables say.

What it is: `BoostedTables`, a small booster that sees, for each sample and block, what the noisy-or
tables of `dynoffload.pilot.association` estimate, how that compares with the rest of the block's
site, the sample's own numbers and the idiom-encoded block, and says whether the block runs. What it
is not: a model per block: one booster ranks all blocks, also those it saw rarely.

The tables of a training sample are fitted on other sources than its own (cross-fitting), else the
booster would learn to trust them for what they memorised. LightGBM is imported where it is used.
Source: Ke et al., "LightGBM", NeurIPS 2017; Wolpert, "Stacked generalization", 1992.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.artifact import checked_weights
from dynoffload.pilot.association import ORDERS, Association, learn_association
from dynoffload.pilot.booster_text import check_booster_text
from dynoffload.pilot.features import Floats, Scaler, learn_scaler
from dynoffload.pilot.mlp import load_book
from dynoffload.pilot.sources import source_folds
from dynoffload.profiler.sample import Sample

if TYPE_CHECKING:
    import lightgbm

Bools = npt.NDArray[np.bool_]

ROUNDS = 24
"""Trees at most: with 400 blocks, 0.1 ms of a prediction."""
LEAVES = 15
FOLDS = 3
MAX_ROWS = 300_000
"""Rows of (sample, block) that the booster is trained on at most."""
EVIDENCE = 5
"""Columns that depend on both sample and block; see `_fill`."""


@dataclass(frozen=True)
class BoostedTables:
    """Association tables and the booster that reads them.

    Attributes:
        association: the tables.
        prior: log-odds that a block runs, whatever the sample, ``[blocks]``.
        described: the blocks' features, ``[blocks, features]``.
        sites: the number of each block's site, ``[blocks]``.
        scaler: how a sample's numbers become a vector.
        booster: LightGBM's own, giving log-odds.
    """

    association: Association
    prior: Floats
    described: Floats
    sites: npt.NDArray[np.int64]
    scaler: Scaler
    booster: lightgbm.Booster

    kind = "lightgbm"

    def probabilities(self, sample: Sample) -> Floats:
        """Return P(the block runs) for each optional block, ``[blocks]``."""
        rows = feature_rows(
            self.association, self.prior, self.described, self.sites, self.scaler, sample
        )
        odds = self.booster.predict(rows, raw_score=True, num_threads=1, validate_features=False)
        return np.asarray(1 / (1 + np.exp(-np.clip(odds, -30, 30))), dtype=np.float32)

    def rest(self, sample: Sample) -> None:
        """Return None: what has run tells this model nothing."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what is stored: tables as float16, the booster as LightGBM's text."""
        books = {f"book{i}": book.keys for i, book in enumerate(self.association.books)}
        columns = EVIDENCE + self.described.shape[1] + len(self.scaler)
        text = check_booster_text(self.booster.model_to_string(), features=columns)
        return {
            **books,
            "table": self.association.table.astype(np.float16),
            "prior": self.prior,
            "described": self.described,
            "sites": self.sites,
            "booster": np.frombuffer(text.encode(), dtype=np.uint8),
        }

    def document(self) -> dict[str, Any]:
        """Return what is stored beside the arrays, as plain JSON data."""
        return {"scaler": self.scaler.to_json(), "books": len(self.association.books)}

    @classmethod
    def load(
        cls, document: Any, arrays: Mapping[str, npt.NDArray[Any]], blocks: int
    ) -> BoostedTables:
        """Build the model from what was stored.

        Raises:
            ValueError, KeyError, TypeError: if the parts are not those of a model for so many
            blocks. PilotError: if LightGBM is not installed.
        """
        count = int(document["books"])
        if not 0 <= count <= ORDERS:
            raise ValueError("the wrong number of code books")
        books = tuple(load_book(arrays[f"book{i}"]) for i in range(count))
        table = checked_weights("table", arrays["table"])
        prior = checked_weights("prior", arrays["prior"])
        described = checked_weights("described", arrays["described"])
        sites = np.asarray(arrays["sites"], dtype=np.int64)
        scaler = Scaler.from_json(document["scaler"])
        rows = 1 + sum(len(book) - 1 for book in books)
        if table.shape != (rows, blocks) or prior.shape != (blocks,) or sites.shape != (blocks,):
            raise ValueError("tables of the wrong shape")
        if described.ndim != 2 or len(described) != blocks:
            raise ValueError("block features of the wrong shape")
        if (table > 0).any():
            raise ValueError("a table of chances above 1")
        if blocks and not (sites.min() >= 0 and sites.max() < blocks):
            raise ValueError("a site that is not there")
        text = np.asarray(arrays["booster"], dtype=np.uint8).tobytes().decode("utf-8")
        text = check_booster_text(text, features=EVIDENCE + described.shape[1] + len(scaler))
        booster = _lightgbm().Booster(model_str=text)
        return cls(Association(books, table), prior, described, sites, scaler, booster)


def feature_rows(
    association: Association,
    prior: Floats,
    described: Floats,
    sites: npt.NDArray[np.int64],
    scaler: Scaler,
    sample: Sample,
) -> Floats:
    """Return the booster's input for one sample, ``[blocks, EVIDENCE + features + values]``.

    The columns of evidence: log-odds of the noisy-or, log-odds of the surest element alone, prior
    log-odds, how many blocks of the site are expected to run, and the noisy-or's place between the
    site's mean and itself.
    """
    silent, surest = association.evidence(sample)
    blocks = len(prior)
    rows = np.empty((blocks, EVIDENCE + described.shape[1] + len(scaler)), dtype=np.float32)
    odds = _log_odds(silent)
    expected = np.bincount(sites, weights=-np.expm1(silent))
    members = np.bincount(sites)
    mean = np.bincount(sites, weights=odds) / np.maximum(members, 1)
    rows[:, 0] = odds
    rows[:, 1] = _log_odds(surest)
    rows[:, 2] = prior
    rows[:, 3] = expected[sites]
    rows[:, 4] = odds - mean[sites]
    rows[:, EVIDENCE : EVIDENCE + described.shape[1]] = described
    rows[:, EVIDENCE + described.shape[1] :] = scaler(sample)
    return rows


def train_tables(
    samples: Sequence[Sample],
    present: Bools,
    described: Floats,
    sites: npt.NDArray[np.int64],
    groups: Sequence[str],
    *,
    seed: int,
    on_stage: Callable[[], None] | None = None,
) -> BoostedTables:
    """Fit the tables and the booster.

    Args:
        samples: one per step.
        present: which block ran in which step, ``[steps, blocks]``.
        described: the blocks' features, ``[blocks, features]``.
        sites: the number of each block's site, ``[blocks]``.
        groups: the source of each step; tables of a step are fitted on other sources.
        seed: for the folds and the booster.
        on_stage: called after each of ``FOLDS + 2`` stages.
    """
    lightgbm = _lightgbm()
    rng = np.random.default_rng(seed)
    scaler = learn_scaler(samples)
    folds = source_folds(groups, FOLDS, seed)
    take = np.ones(present.shape, dtype=np.bool_)
    if present.size > MAX_ROWS:
        take = rng.random(present.shape) < MAX_ROWS / present.size
    inputs: list[Floats] = []
    labels: list[Bools] = []
    for fold in range(FOLDS):
        inside = np.flatnonzero(folds != fold).tolist()
        if not inside or len(inside) == len(samples):
            inside = list(range(len(samples)))
        association = learn_association([samples[i] for i in inside], present[inside])
        prior = _prior(present[inside])
        for i in np.flatnonzero(folds == fold).tolist():
            rows = feature_rows(association, prior, described, sites, scaler, samples[i])
            inputs.append(rows[take[i]])
            labels.append(present[i][take[i]])
        if on_stage:
            on_stage()
    data = lightgbm.Dataset(np.concatenate(inputs), np.concatenate(labels).astype(np.float32))
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
    booster = lightgbm.train(settings, data, ROUNDS)
    # Train, then forget the data: only the text counts, as it will be after loading.
    text = check_booster_text(booster.model_to_string(), features=data.num_feature())
    booster = lightgbm.Booster(model_str=text)
    if on_stage:
        on_stage()
    association = learn_association(samples, present)
    if on_stage:
        on_stage()
    # Kept in the precision it is stored in, so that a file predicts as the pilot it was made of.
    table = association.table.astype(np.float16).astype(np.float32)
    association = replace(association, table=table)
    return BoostedTables(association, _prior(present), described, sites, scaler, booster)


def _prior(present: Bools) -> Floats:
    share = (present.sum(axis=0) + 0.5) / (len(present) + 1.0)
    return np.asarray(np.log(share / (1 - share)), dtype=np.float32)


def _log_odds(silent: Floats) -> Floats:
    """Return log(P / (1 - P)) where ``silent`` is log(1 - P)."""
    return np.asarray(np.log(np.maximum(-np.expm1(silent), 1e-7)) - silent, dtype=np.float32)


def _lightgbm() -> Any:
    """Import LightGBM where it is first needed: it takes longer than the rest of the package."""
    from dynoffload.errors import PilotError

    try:
        import lightgbm
    except ImportError as error:
        raise PilotError(
            "this pilot needs LightGBM, which is not installed: pip install lightgbm, "
            "or train with model='mlp'"
        ) from error
    return lightgbm
