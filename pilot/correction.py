"""Correction within the step: the rest foretold anew from what has run so far.

What it is: `Correction`, learned from what a model foretold of steps it had not seen and what they
ran, and `Course`, one step's chances as they change. Two things are learned. How surprises go
together: a block that ran against expectation makes others likelier, by the covariance of what was
wrong, and the expectation of the rest follows from its Cholesky factor, a column per block told.
And how much to believe whom: for each site a logistic regression blends the model's log-odds, what
surprises say, and a hint where the network gave one; that also calibrates the chances. What it is
not: a use of backward, which replays what forward ran.

Sources: Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices",
2004 (shrinkage); Platt, "Probabilistic outputs for support vector machines", 1999 (calibration).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.features import Floats

Bools = npt.NDArray[np.bool_]

COLUMNS = 5
"""What is blended: a constant, log-odds, the surprises' share, the hint, whether there is one."""
MAX_SURPRISE = 5.0
"""Surprises are brought back to so many deviations."""
RIDGE = 1.0
"""Imagined evidence, per number, that a site blends as all sites do."""
_FOLDS = 4
_NEWTON = 12
_LEAST = 0.02  # the deviation that surprises are measured in, at least


@dataclass(frozen=True)
class Correction:
    """What was learned of a model's errors.

    Attributes:
        sites: the number of each block's site, ``[blocks]``.
        factor: the Cholesky factor of the covariance of surprises, transposed (row i holds what
            block i tells of those after it), float32 ``[blocks, blocks]``.
        blend: for each site the weights of `COLUMNS`, ``[sites, COLUMNS]``.
    """

    sites: npt.NDArray[np.int64]
    factor: Floats
    blend: Floats

    def start(self, chances: Floats) -> Course:
        """Begin a step of which a model foretold ``chances``, ``[blocks]``."""
        return Course(self, chances)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what is stored."""
        return {
            "correction_sites": self.sites,
            "correction_factor": self.factor.astype(np.float16),
            "correction_blend": self.blend,
        }

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]], blocks: int) -> Correction:
        """Build a correction from what was stored.

        Raises:
            ValueError, KeyError: if the parts are not those of a correction for so many blocks.
        """
        sites = np.asarray(arrays["correction_sites"], dtype=np.int64)
        factor = np.asarray(arrays["correction_factor"], dtype=np.float32)
        blend = np.asarray(arrays["correction_blend"], dtype=np.float32)
        if sites.shape != (blocks,) or factor.shape != (blocks, blocks):
            raise ValueError("a correction of the wrong shape")
        if blend.ndim != 2 or blend.shape[1] != COLUMNS:
            raise ValueError("a blend of the wrong shape")
        if not np.isfinite(factor).all() or not np.isfinite(blend).all():
            raise ValueError("a correction that is not finite")
        if (np.diagonal(factor) <= 0).any():
            raise ValueError("a factor that is none")
        if blocks and not (sites.min() >= 0 and sites.max() < len(blend)):
            raise ValueError("a site that is not there")
        return cls(sites, factor, blend)


class Course:
    """One step: what was foretold, what ran, and what to expect of the rest.

    Attributes:
        known: how many of the blocks are known to have run or not.
    """

    def __init__(self, correction: Correction, chances: Floats) -> None:
        self.known = 0
        self._correction = correction
        self._chances = np.clip(chances, 1e-4, 1 - 1e-4)
        self._deviation = _deviation(self._chances)
        self._mean = np.zeros(len(chances), dtype=np.float32)
        self._hints = np.full(len(chances), np.nan, dtype=np.float32)
        self._ran = np.zeros(len(chances), dtype=np.bool_)

    def tell(self, ran: bool) -> None:
        """The next block, in canonical order, ran or did not."""
        i, factor = self.known, self._correction.factor
        surprise = (float(ran) - self._chances[i]) / self._deviation[i]
        surprise = min(max(surprise, -MAX_SURPRISE), MAX_SURPRISE)
        weight = (surprise - self._mean[i]) / factor[i, i]
        self._mean[i + 1 :] += weight * factor[i, i + 1 :]
        self._ran[i] = ran
        self.known += 1

    def hint(self, places: npt.NDArray[np.int64], values: Floats) -> None:
        """The network hints at blocks to come.

        Args:
            places: which blocks.
            values: how likely the hint makes each, 0 to 1.
        """
        self._hints[places] = values

    def replace(self, chances: Floats) -> None:
        """The model itself foretells the rest anew: from here on by these ``chances``."""
        rest = slice(self.known, None)
        self._chances[rest] = np.clip(chances[rest], 1e-4, 1 - 1e-4)

    @property
    def chances(self) -> Floats:
        """P(runs) of each block: 0 or 1 of the known ones, corrected for the rest."""
        result = self._ran.astype(np.float32)
        rest = slice(self.known, None)
        rows = blend_rows(
            self._chances[rest], self._mean[rest] * self._deviation[rest], self._hints[rest]
        )
        weights = self._correction.blend[self._correction.sites[rest]]
        result[rest] = _sigmoid((rows * weights).sum(axis=1))
        return result


def blend_rows(chances: Floats, shift: Floats, hints: Floats) -> Floats:
    """Return what is blended, ``[blocks, COLUMNS]``."""
    rows = np.ones((len(chances), COLUMNS), dtype=np.float32)
    rows[:, 1] = np.log(chances / (1 - chances))
    shifted = np.clip(chances + shift, 1e-3, 1 - 1e-3)
    rows[:, 2] = np.log(shifted / (1 - shifted)) - np.clip(rows[:, 1], -6.9, 6.9)
    hinted = ~np.isnan(hints)
    rows[:, 3] = np.where(hinted, np.nan_to_num(hints) - 0.5, 0.0)
    rows[:, 4] = hinted
    return rows


def learn_correction(
    chances: Floats,
    ran: Bools,
    sites: npt.NDArray[np.int64],
    hints: Floats | None = None,
    again: Callable[[int, Sequence[bool]], Floats] | None = None,
) -> Correction:
    """Learn how a model errs.

    Args:
        chances: what it foretold of steps it had not learned from, ``[steps, blocks]``.
        ran: what they ran, ``[steps, blocks]``.
        sites: the number of each block's site, ``[blocks]``, blocks in canonical order.
        hints: what the network hinted just before each site, NaN where it did not,
            ``[steps, blocks]``.
        again: how the model itself foretells the rest of a step, by its number and what its first
            blocks ran; None where the model does not.
    """
    steps, blocks = ran.shape
    chances = np.clip(chances, 1e-4, 1 - 1e-4).astype(np.float32)
    hints = np.full(ran.shape, np.nan, dtype=np.float32) if hints is None else hints
    neutral = _neutral(int(sites.max()) + 1 if blocks else 1)
    folds = np.arange(steps) % min(_FOLDS, max(steps, 1))
    rows: list[Floats] = []
    for fold in np.unique(folds):
        inside = folds != fold if steps > 1 else folds == fold
        factor = surprise_factor(chances[inside], ran[inside])
        bare = Correction(sites, factor, neutral)
        for step in np.flatnonzero(folds == fold).tolist():
            rows.append(_course_rows(bare, step, chances[step], ran[step], hints[step], again))
    order = np.argsort(np.concatenate([np.flatnonzero(folds == f) for f in np.unique(folds)]))
    inputs = np.stack(rows)[order]
    blend = _learn_blend(inputs, ran, sites, len(neutral))
    return Correction(sites, _stored(surprise_factor(chances, ran)), blend)


def _course_rows(
    bare: Correction,
    step: int,
    chances: Floats,
    ran: Bools,
    hints: Floats,
    again: Callable[[int, Sequence[bool]], Floats] | None,
) -> Floats:
    """Return what is blended for each block when its site begins, ``[blocks, COLUMNS]``."""
    course = bare.start(chances)
    blocks = len(chances)
    ends = [*(np.flatnonzero(np.diff(bare.sites)) + 1).tolist(), blocks]
    rows = np.empty((blocks, COLUMNS), dtype=np.float32)
    begin = 0
    for stop in ends:
        if again is not None and begin:
            course.replace(again(step, ran[:begin].tolist()))
        here = slice(begin, stop)
        shift = course._mean[here] * course._deviation[here]
        rows[here] = blend_rows(course._chances[here], shift, hints[here])
        for block in range(begin, stop):
            course.tell(bool(ran[block]))
        begin = stop
    return rows


def surprise_factor(chances: Floats, ran: Bools) -> Floats:
    """Return the transposed Cholesky factor of the shrunk covariance of surprises."""
    surprise = (ran - chances) / _deviation(chances)
    surprise = np.clip(surprise, -MAX_SURPRISE, MAX_SURPRISE).astype(np.float64)
    steps, blocks = surprise.shape
    covariance = surprise.T @ surprise / max(steps, 1)
    mean = float(np.trace(covariance)) / max(blocks, 1)
    apart = float(((covariance - mean * np.eye(blocks)) ** 2).sum())
    # How far single steps' outer products lie from their mean, without forming them.
    squares = surprise**2
    spread = float((squares.sum(axis=1) ** 2).sum()) / max(steps, 1) ** 2
    spread -= float((covariance**2).sum()) / max(steps, 1)
    shrink = min(1.0, max(spread, 0.0) / apart) if apart > 0 else 1.0
    diagonal = np.diag(np.maximum(np.diag(covariance), 1e-2))
    shrunk = (1 - shrink) * covariance + shrink * diagonal + 1e-3 * np.eye(blocks)
    return np.ascontiguousarray(np.linalg.cholesky(shrunk).T, dtype=np.float32)


def _learn_blend(inputs: Floats, ran: Bools, sites: npt.NDArray[np.int64], count: int) -> Floats:
    """Fit the logistic regressions: one over all sites, and each site's own, drawn to it."""
    flat = inputs.reshape(-1, COLUMNS).astype(np.float64)
    start = _neutral(1)[0].astype(np.float64)
    shared = _logistic(flat, ran.reshape(-1), start, RIDGE)
    blend = np.empty((count, COLUMNS), dtype=np.float32)
    for site in range(count):
        of_site = sites == site
        if not of_site.any():
            blend[site] = shared
            continue
        part = inputs[:, of_site].reshape(-1, COLUMNS).astype(np.float64)
        blend[site] = _logistic(part, ran[:, of_site].reshape(-1), shared, RIDGE)
    return blend


def _logistic(
    rows: npt.NDArray[np.float64],
    truth: Bools,
    towards: npt.NDArray[np.float64],
    ridge: float,
) -> npt.NDArray[np.float64]:
    """Return the weights that fit best, drawn ``towards`` others, by Newton's steps."""
    weights = towards.copy()
    for _ in range(_NEWTON):
        chance = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        gradient = rows.T @ (chance - truth) + ridge * (weights - towards)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows
        step = np.linalg.solve(curvature + ridge * np.eye(len(weights)), gradient)
        longest = float(np.abs(step).max())
        weights = weights - step * min(1.0, 2.0 / max(longest, 1e-12))
        if longest < 1e-6:
            break
    return weights


def _neutral(sites: int) -> Floats:
    """Return the blend that believes the model and what surprises say, and no hint."""
    blend = np.zeros((sites, COLUMNS), dtype=np.float32)
    blend[:, 1:3] = 1.0
    return blend


def _stored(factor: Floats) -> Floats:
    """Return the factor in the precision it is stored in."""
    return np.asarray(factor.astype(np.float16), dtype=np.float32)


def _deviation(chances: Floats) -> Floats:
    return np.asarray(np.maximum(np.sqrt(chances * (1 - chances)), _LEAST), dtype=np.float32)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -30, 30))), dtype=np.float32)
