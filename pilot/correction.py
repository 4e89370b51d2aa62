"""Correction within the step: the rest predicted anew from what has run so far.

`Correction` is learned from what a model predicted of steps it had not seen and what they ran;
`Posterior` is one step's chances as they change. Two things are learned. How residuals go together:
a block that ran against expectation makes others likelier, by the covariance of what was wrong. The
expectation of the rest follows from its Cholesky factor, one column per observed block. And how far
to trust each source: for each site a logistic regression blends the model's log-odds with the
residuals, and two more blend these with a hint, one given ahead (other decisions were open before
it) or one at hand. That also calibrates the chances.

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
"""What is blended: a constant, log-odds, the residuals' share, the hint, and its side."""
SOURCES = 3
"""What a blend can rest on: no hint, one given ahead, one at hand."""
MAX_RESIDUAL = 5.0
"""Residuals are brought back to so many deviations."""
RIDGE = 1.0
"""Imagined evidence, per number, that a site blends as all sites do."""
MAX_STEPS = 512
"""Steps that are followed to learn how far to believe residuals."""
_NEWTON = 12
_LEAST = 0.02  # the deviation that residuals are measured in, at least


@dataclass(frozen=True)
class Correction:
    """What was learned of a model's errors.

    Attributes:
        sites: the number of each block's site, ``[blocks]``.
        factor: the Cholesky factor of the covariance of residuals, transposed (row i holds what
            block i tells of those after it), float32 ``[blocks, blocks]``.
        blend: for each site the weights of `COLUMNS` without a hint, with one given ahead and with
            one at hand, ``[sites, SOURCES, COLUMNS]``.
    """

    sites: npt.NDArray[np.int64]
    factor: Floats
    blend: Floats

    def start(self, chances: Floats) -> Posterior:
        """Begin a step of which a model foretold ``chances``, ``[blocks]``."""
        return Posterior(self, chances)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what is stored."""
        return {
            "correction_factor": self.factor.astype(np.float16),
            "correction_blend": self.blend,
        }

    @classmethod
    def load(
        cls, arrays: Mapping[str, npt.NDArray[Any]], sites: npt.NDArray[np.int64]
    ) -> Correction:
        """Build a correction from what was stored, and the sites of the blocks.

        Raises:
            ValueError, KeyError: if the parts are not those of a correction for these blocks.
        """
        factor = checked_weights("correction_factor", arrays["correction_factor"])
        blend = checked_weights("correction_blend", arrays["correction_blend"])
        if factor.shape != (len(sites), len(sites)):
            raise ValueError("a correction of the wrong shape")
        if blend.ndim != 3 or blend.shape[1:] != (SOURCES, COLUMNS) or sites.max() >= len(blend):
            raise ValueError("a blend of the wrong shape")
        if (np.diagonal(factor) <= 0).any():
            raise ValueError("a factor that is none")
        return cls(sites, factor, blend)


class Posterior:
    """One step: what was foretold, what ran, and what to expect of the rest.

    Attributes:
        known: how many of the blocks are known to have run or not.
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
        """The next block, in canonical order, ran or did not."""
        i, factor = self.known, self._correction.factor
        residual = (ran - self._chances[..., i]) / self._deviation[..., i]
        residual = np.clip(residual, -MAX_RESIDUAL, MAX_RESIDUAL)
        weight = (residual - self._mean[..., i]) / factor[i, i]
        self._mean[..., i + 1 :] += weight[..., None] * factor[i, i + 1 :]
        self._ran[..., i] = ran
        self.known += 1

    def hint(self, places: npt.NDArray[np.int64], values: Floats, *, at_hand: bool = False) -> None:
        """The network hints at blocks to come.

        Args:
            places: which blocks.
            values: how likely the hint makes each, 0 to 1.
            at_hand: whether no other decision is open before that about them.
        """
        self._hints[places] = values
        self._sources[places] = 2 if at_hand else 1

    @property
    def hinted(self) -> Bools:
        """Which blocks the network hinted at."""
        return ~np.isnan(self._hints)

    @property
    def chances(self) -> Floats:
        """P(runs) of each block: 0 or 1 of the known ones, corrected for the rest."""
        result = self._ran.astype(np.float32)
        rest = slice(self.known, None)
        rows = self.rows(rest)
        weights = self._correction.blend[self._correction.sites[rest], self._sources[rest]]
        result[rest] = sigmoid((rows * weights).sum(axis=1))
        return result

    def rows(self, here: slice) -> Floats:
        """Return what is blended for some blocks, ``[..., COLUMNS]``."""
        rows = blend_rows(self._chances[..., here], (self._mean * self._deviation)[..., here])
        _enter_hints(rows, self._hints[..., here])
        return rows


def blend_rows(chances: Floats, shift: Floats) -> Floats:
    """Return what is blended without hints, ``[..., COLUMNS]`` for arrays of one shape."""
    rows = np.ones((*chances.shape, COLUMNS), dtype=np.float32)
    rows[..., 1] = np.log(chances / (1 - chances))
    shifted = np.clip(chances + shift, 1e-3, 1 - 1e-3)
    rows[..., 2] = np.log(shifted / (1 - shifted)) - np.clip(rows[..., 1], -6.9, 6.9)
    rows[..., 3:] = 0
    return rows


def _enter_hints(rows: npt.NDArray[Any], hints: Floats) -> None:
    """Put hints into the columns that are theirs."""
    rows[..., 3] = np.nan_to_num(hints, nan=0.5) - 0.5
    rows[..., 4] = np.sign(rows[..., 3])


def learn_correction(
    chances: Floats,
    ran: Bools,
    sites: npt.NDArray[np.int64],
    folds: npt.NDArray[np.int64],
    hints: Floats | None = None,
) -> tuple[Correction, Floats]:
    """Learn how a model errs.

    Args:
        chances: what it foretold of steps it had not learned from, ``[steps, blocks]``.
        ran: what they ran, ``[steps, blocks]``.
        sites: the number of each block's site, ``[blocks]``, blocks in canonical order.
        folds: the number of each step's part, ``[steps]``: no part teaches what is said of it.
        hints: what the network hinted about each block, ahead and at hand, NaN where it did not,
            ``[steps, blocks, 2]``.

    Returns:
        the correction, and ``chances`` as they are corrected before a step by what the other parts
        teach, ``[steps, blocks]``.
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
        mine = folds[followed] == part
        steps = followed[mine]
        rows[mine] = _posterior_rows(factor, chances[steps], ran[steps], sites)
    start = blend_rows(chances, np.zeros_like(chances))
    calibrated = np.empty_like(chances)
    for part in np.unique(folds):
        taught = folds[followed] != part
        blend = _learn_blend(start, rows, followed, taught, ran, sites, hints, count)
        mine = folds == part
        calibrated[mine] = sigmoid((start[mine] * blend[sites, 0]).sum(axis=2))
    every = np.ones(len(followed), dtype=np.bool_)
    blend = _learn_blend(start, rows, followed, every, ran, sites, hints, count)
    stored = np.asarray(residual_factor(chances, ran).astype(np.float16), dtype=np.float32)
    return Correction(sites, stored, blend), calibrated


def _posterior_rows(
    factor: Floats, chances: Floats, ran: Bools, sites: npt.NDArray[np.int64]
) -> Floats:
    """Return what is blended for each block when its site begins, but for hints,
    ``[steps, blocks, COLUMNS]``."""
    posterior = Posterior(Correction(sites, factor, np.zeros(0, dtype=np.float32)), chances)
    rows = np.empty((*chances.shape, COLUMNS), dtype=np.float32)
    for begin, stop in pairwise((0, *site_stops(sites))):
        rows[:, begin:stop] = posterior.rows(slice(begin, stop))
        for block in range(begin, stop):
            posterior.observe(ran[:, block])
    return rows


def residual_factor(chances: Floats, ran: Bools) -> Floats:
    """Return the transposed Cholesky factor of the covariance of residuals, shrunk to its
    diagonal."""
    residual = (ran - chances) / _deviation(chances)
    residual = np.clip(residual, -MAX_RESIDUAL, MAX_RESIDUAL).astype(np.float64)
    steps, blocks = residual.shape
    covariance = residual.T @ residual / max(steps, 1)
    variances = np.diag(covariance)
    apart = float((covariance**2).sum() - (variances**2).sum())
    # How far single steps' products lie from their mean, off the diagonal, without forming them.
    squares = residual**2
    products = float((squares.sum(axis=1) ** 2).sum() - (squares**2).sum())
    spread = (products / max(steps, 1) - apart) / max(steps, 1)
    shrink = min(1.0, max(spread, 0.0) / apart) if apart > 1e-12 else 1.0
    shrunk = (1 - shrink) * covariance
    shrunk[np.diag_indices(blocks)] = np.maximum(variances, 1e-2) + 1e-3
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
    """Fit the logistic regressions, without hints and with them, each drawn to one over all sites:
    to what is blended before each of the steps ``followed`` that is ``taught``, and as each of its
    sites begins."""
    steps = followed[taught]
    truth = ran[steps]

    def fitted(rows: Floats, truth: Bools, chosen: Bools, towards: Wide) -> tuple[Wide, Wide]:
        """Return the weights over all sites, and those of each."""
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
        told = hints[steps][..., source - 1]
        with_hint = rows[taught]
        _enter_hints(with_hint, told)
        blend[:, source] = fitted(with_hint, truth, ~np.isnan(told), shared)[1]
    return blend


def _logistic(rows: Wide, truth: Bools, towards: Wide) -> Wide:
    """Return the weights that fit best, drawn ``towards`` others, by Newton's steps."""
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
