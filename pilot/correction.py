"""Within-step correction: updates predictions of the remaining blocks from those that ran so far.

`Correction` is learned from a model's predictions for unseen steps and the steps' true blocks;
`Posterior` holds the probabilities of one step as it runs. Two things are learned. First, how
residuals correlate: a block that ran unexpectedly changes the probability of others by the
covariance of residuals. The conditional mean follows from its Cholesky factor, one column per
observed block. Second, how far to trust each source: for each site a logistic regression blends the
model's log-odds with the residuals. Two more blend these with a hint, given ahead (while earlier
decisions are open) or at hand. This also calibrates the probabilities.

Sources: Schäfer and Strimmer, "A shrinkage approach to large-scale covariance matrix estimation",
2005 (their target D, the diagonal); Platt, "Probabilistic outputs for support vector machines",
1999 (calibration).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.features import Floats, sigmoid, site_stops
from dynoffload.profiler.safefile import checked_weights

Bools = npt.NDArray[np.bool_]
Wide = npt.NDArray[np.float64]

COLUMNS = 5
"""Blended columns: constant, log-odds, shift by residuals, hint minus 0.5, and its sign."""
SOURCES = 3
"""Kinds of blend: no hint, a hint given ahead, a hint at hand."""
MAX_RESIDUAL = 5.0
"""Residuals are clipped to this many standard deviations."""
RIDGE = 1.0
"""Strength of the prior, per weight, that draws each site's blend to that of all sites."""
MAX_STEPS = 512
"""Steps replayed to learn how far to trust residuals."""
_NEWTON = 12  # iterations
_LEAST = 0.02  # lower bound of a residual's standard deviation
_FAR = 1e6  # beyond every mean of a learned factor; one from a damaged file may grow without end
_JITTER = 1e-3  # added to the variances of residuals
_LEAST_FACTOR = 0.03  # below every diagonal of a learned factor, whose squares are at least _JITTER


@dataclass(frozen=True)
class Correction:
    """Learned statistics of a model's errors.

    Attributes:
        sites: the number of each block's site, ``[blocks]``.
        factor: the Cholesky factor of the covariance of residuals, transposed (row i holds the
            effect of block i on those after it), float32 ``[blocks, blocks]``.
        blend: for each site the weights of `COLUMNS` without a hint, with one given ahead and with
            one at hand, ``[sites, SOURCES, COLUMNS]``.
    """

    sites: npt.NDArray[np.int64]
    factor: Floats
    blend: Floats

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store."""
        return {
            "correction_factor": self.factor.astype(np.float16),
            "correction_blend": self.blend,
        }

    @classmethod
    def load(
        cls, arrays: Mapping[str, npt.NDArray[Any]], sites: npt.NDArray[np.int64]
    ) -> Correction:
        """Build a correction from its stored form and the sites of the blocks.

        Raises:
            ValueError, KeyError: if the parts are not a correction for these blocks.
        """
        factor = checked_weights("correction_factor", arrays["correction_factor"])
        blend = checked_weights("correction_blend", arrays["correction_blend"])
        if factor.shape != (len(sites), len(sites)):
            raise ValueError("a correction of the wrong shape")
        if blend.ndim != 3 or blend.shape[1:] != (SOURCES, COLUMNS) or sites.max() >= len(blend):
            raise ValueError("a blend of the wrong shape")
        if (np.diagonal(factor) < _LEAST_FACTOR).any():
            raise ValueError("a factor that is none")
        return cls(sites, factor, blend)


class Posterior:
    """State of one step: predictions, the blocks that ran, and the probabilities of the rest.

    Attributes:
        known: number of blocks, in canonical order, that are known to have run or not.
    """

    def __init__(self, correction: Correction, chances: Floats) -> None:
        self.known = 0
        self._correction = correction
        self._chances = np.clip(chances, 1e-4, 1 - 1e-4)
        self._deviation = _deviation(self._chances)
        self._mean = np.zeros(chances.shape, dtype=np.float32)
        self._hints = np.full(chances.shape, np.nan, dtype=np.float32)
        self._sources = np.zeros(chances.shape, dtype=np.int64)
        self._ran = np.zeros(chances.shape, dtype=np.bool_)

    def observe(self, ran: bool | Bools) -> None:
        """Record whether the next block, in canonical order, ran."""
        i, factor = self.known, self._correction.factor
        residual = (ran - self._chances[..., i]) / self._deviation[..., i]
        residual = np.clip(residual, -MAX_RESIDUAL, MAX_RESIDUAL)
        weight = (residual - self._mean[..., i]) / factor[i, i]
        rest = self._mean[..., i + 1 :]
        np.clip(rest + weight[..., None] * factor[i, i + 1 :], -_FAR, _FAR, out=rest)
        self._ran[..., i] = ran
        self.known += 1

    def hint(self, places: npt.NDArray[np.int64], values: Floats, *, at_hand: bool = False) -> None:
        """Record a routing hint about coming blocks.

        Args:
            places: indices of the blocks.
            values: the hinted probability of each, 0 to 1.
            at_hand: whether no earlier decision is still open.
        """
        self._hints[places] = values
        self._sources[places] = 2 if at_hand else 1

    @property
    def hinted(self) -> Bools:
        """Mask of the blocks with a hint."""
        return ~np.isnan(self._hints)

    @property
    def chances(self) -> Floats:
        """P(runs) of each block: 0 or 1 if known, the corrected estimate otherwise."""
        result = self._ran.astype(np.float32)
        rest = slice(self.known, None)
        rows = self.rows(rest)
        weights = self._correction.blend[self._correction.sites[rest], self._sources[rest]]
        result[rest] = sigmoid((rows * weights).sum(axis=1))
        return result

    def rows(self, here: slice) -> Floats:
        """Return the blended columns of some blocks, ``[..., COLUMNS]``."""
        rows = blend_rows(self._chances[..., here], (self._mean * self._deviation)[..., here])
        _enter_hints(rows, self._hints[..., here])
        return rows


def blend_rows(chances: Floats, shift: Floats) -> Floats:
    """Return the blended columns without hints, ``[..., COLUMNS]``, for arrays of equal shape."""
    rows = np.ones((*chances.shape, COLUMNS), dtype=np.float32)
    rows[..., 1] = np.log(chances / (1 - chances))
    shifted = np.clip(chances + shift, 1e-3, 1 - 1e-3)
    rows[..., 2] = np.log(shifted / (1 - shifted)) - np.clip(rows[..., 1], -6.9, 6.9)
    rows[..., 3:] = 0
    return rows


def _enter_hints(rows: npt.NDArray[Any], hints: Floats) -> None:
    """Write hints into their columns, in place."""
    rows[..., 3] = np.nan_to_num(hints, nan=0.5) - 0.5
    rows[..., 4] = np.sign(rows[..., 3])


def learn_correction(
    chances: Floats,
    ran: Bools,
    sites: npt.NDArray[np.int64],
    folds: npt.NDArray[np.int64],
    hints: Floats | None = None,
) -> tuple[Correction, Floats]:
    """Learn the statistics of a model's errors.

    Args:
        chances: its predictions for steps it was not trained on, ``[steps, blocks]``.
        ran: which blocks ran, ``[steps, blocks]``.
        sites: the number of each block's site, ``[blocks]``, blocks in canonical order.
        folds: the fold of each step, ``[steps]``; a fold is calibrated from the other folds.
        hints: the hint about each block, given ahead and at hand, NaN where there was none,
            ``[steps, blocks, 2]``.

    Returns:
        the correction, and ``chances`` as calibrated before the step begins by what was learned
        from the other folds, ``[steps, blocks]``.
    """
    chances = np.clip(chances, 1e-4, 1 - 1e-4).astype(np.float32)
    if hints is None:
        hints = np.full((*ran.shape, SOURCES - 1), np.nan, dtype=np.float32)
    count = int(sites.max()) + 1
    followed = np.linspace(0, len(ran) - 1, min(len(ran), MAX_STEPS)).astype(np.int64)
    rows = np.empty((len(followed), ran.shape[1], COLUMNS), dtype=np.float32)
    for part in np.unique(folds):
        inside = folds != part
        factor = residual_factor(chances[inside], ran[inside])
        in_fold = folds[followed] == part
        steps = followed[in_fold]
        rows[in_fold] = _posterior_rows(factor, chances[steps], ran[steps], sites)
    start = blend_rows(chances, np.zeros_like(chances))
    calibrated = np.empty_like(chances)
    for part in np.unique(folds):
        taught = folds[followed] != part
        blend = _learn_blend(start, rows, followed, taught, ran, sites, hints, count)
        in_fold = folds == part
        calibrated[in_fold] = sigmoid((start[in_fold] * blend[sites, 0]).sum(axis=2))
    every = np.ones(len(followed), dtype=np.bool_)
    blend = _learn_blend(start, rows, followed, every, ran, sites, hints, count)
    stored = np.asarray(residual_factor(chances, ran).astype(np.float16), dtype=np.float32)
    return Correction(sites, stored, blend), calibrated


def _posterior_rows(
    factor: Floats, chances: Floats, ran: Bools, sites: npt.NDArray[np.int64]
) -> Floats:
    """Return each block's blended columns, without hints, at the start of its site,
    ``[steps, blocks, COLUMNS]``."""
    posterior = Posterior(Correction(sites, factor, np.zeros(0, dtype=np.float32)), chances)
    rows = np.empty((*chances.shape, COLUMNS), dtype=np.float32)
    for begin, stop in pairwise((0, *site_stops(sites))):
        rows[:, begin:stop] = posterior.rows(slice(begin, stop))
        for block in range(begin, stop):
            posterior.observe(ran[:, block])
    return rows


def residual_factor(chances: Floats, ran: Bools) -> Floats:
    """Return the transposed Cholesky factor of the covariance of residuals, shrunk towards its
    diagonal."""
    residual = (ran - chances) / _deviation(chances)
    residual = np.clip(residual, -MAX_RESIDUAL, MAX_RESIDUAL).astype(np.float64)
    steps, blocks = residual.shape
    covariance = residual.T @ residual / max(steps, 1)
    variances = np.diag(covariance)
    apart = float((covariance**2).sum() - (variances**2).sum())
    # Variance of the off-diagonal products over steps, without forming the products.
    squares = residual**2
    products = float((squares.sum(axis=1) ** 2).sum() - (squares**2).sum())
    spread = (products / max(steps, 1) - apart) / max(steps, 1)
    shrink = min(1.0, max(spread, 0.0) / apart) if apart > 1e-12 else 1.0
    shrunk = (1 - shrink) * covariance
    shrunk[np.diag_indices(blocks)] = np.maximum(variances, 1e-2) + _JITTER
    return np.ascontiguousarray(np.linalg.cholesky(shrunk).T, dtype=np.float32)


def _learn_blend(
    start: Floats,
    rows: Floats,
    followed: npt.NDArray[np.int64],
    taught: Bools,
    ran: Bools,
    sites: npt.NDArray[np.int64],
    hints: Floats,
    count: int,
) -> Floats:
    """Fit the logistic regressions with and without hints, each regularised to one over all sites.
    Data: the ``followed`` steps selected by ``taught``, at the start of the step and of each site.
    """
    steps = followed[taught]
    truth = ran[steps]

    def fitted(rows: Floats, truth: Bools, chosen: Bools, towards: Wide) -> tuple[Wide, Wide]:
        """Return the weights over all sites, and those of each site."""
        wide = rows.astype(np.float64)
        every = _logistic(wide[chosen], truth[chosen], towards)
        parts = [chosen & (sites == site) for site in range(count)]
        return every, np.stack([_logistic(wide[part], truth[part], every) for part in parts])

    both = np.concatenate((start[steps], rows[taught]))
    all_of_them = np.ones(both.shape[:2], dtype=np.bool_)
    blend = np.empty((count, SOURCES, COLUMNS), dtype=np.float32)
    neutral = np.array([0.0, 1.0, 1.0, 0.0, 0.0])
    shared, blend[:, 0] = fitted(both, np.concatenate((truth, truth)), all_of_them, neutral)
    for source in range(1, SOURCES):
        hint_values = hints[steps][..., source - 1]
        with_hint = rows[taught]
        _enter_hints(with_hint, hint_values)
        blend[:, source] = fitted(with_hint, truth, ~np.isnan(hint_values), shared)[1]
    return blend


def _logistic(rows: Wide, truth: Bools, towards: Wide) -> Wide:
    """Fit weights regularised ``towards`` others, by Newton's method."""
    weights = towards.copy()
    for _ in range(_NEWTON):
        chance = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        gradient = rows.T @ (chance - truth) + RIDGE * (weights - towards)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows
        step = np.linalg.solve(curvature + RIDGE * np.eye(len(weights)), gradient)
        longest = float(np.abs(step).max())
        weights = weights - step * min(1.0, 2.0 / max(longest, 1e-12))
        if longest < 1e-6:
            break
    return weights


def _deviation(chances: Floats) -> Floats:
    return np.asarray(np.maximum(np.sqrt(chances * (1 - chances)), _LEAST), dtype=np.float32)
