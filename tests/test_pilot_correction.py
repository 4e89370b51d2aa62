"""What has run corrects what is predicted of the rest, and chances come to mean what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.pilot.correction import (
    Correction,
    learn_correction,
)

SITES = np.repeat(np.arange(4), 3)


def _learned(chances: np.ndarray, ran: np.ndarray, sites: np.ndarray, *more: Any) -> Correction:
    return learn_correction(chances, ran, sites, np.arange(len(ran)) % 4, *more)[0]


def test_overconfident_chances_are_calibrated() -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.2, 0.8, size=(500, 12))
    ran = rng.random(truth.shape) < truth
    odds = 4 * np.log(truth / (1 - truth))
    said = (1 / (1 + np.exp(-odds))).astype(np.float32)
    correction = _learned(said, ran, SITES)
    calibrated = np.stack([correction.start(chances).chances for chances in said])
    assert np.abs(calibrated - truth).mean() < 0.05 < np.abs(said - truth).mean()


def _ahead(hints: np.ndarray) -> np.ndarray:
    """Return hints that were given ahead, and none at hand."""
    return np.stack((hints, np.full(hints.shape, np.nan, np.float32)), axis=2)


def test_hints_at_hand_are_believed_on_their_own_and_by_their_side() -> None:
    """Those given ahead are noise; those at hand lie just above or below a half, and are right."""
    rng = np.random.default_rng(0)
    ran = rng.random((400, 12)) < 0.4
    ahead = rng.random(ran.shape).astype(np.float32)
    at_hand = np.where(ran, 0.51, 0.49).astype(np.float32)
    correction = _learned(
        np.full(ran.shape, 0.4, np.float32), ran, SITES, np.stack((ahead, at_hand), axis=2)
    )
    posterior = correction.start(np.full(12, 0.4, np.float32))
    posterior.hint(np.arange(6), np.array([0.9, 0.1, 0.9, 0.1, 0.9, 0.1], np.float32))
    assert posterior.chances[:6] == pytest.approx(0.4, abs=0.15)
    posterior.hint(np.arange(3), np.array([0.51, 0.49, 0.49], np.float32), at_hand=True)
    assert ((posterior.chances[:3] > 0.5) == [True, False, False]).all()
    assert np.abs(posterior.chances[:3] - 0.5).min() > 0.4
    assert posterior.chances[3:6] == pytest.approx(0.4, abs=0.15)


@settings(max_examples=50, deadline=None)
@given(
    steps=st.integers(1, 6),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 99),
    sure=st.booleans(),
)
def test_chances_are_chances_whatever_is_told(
    steps: int, blocks: int, seed: int, sure: bool
) -> None:
    rng = np.random.default_rng(seed)
    ran = rng.random((steps, blocks)) < 0.5
    chances = rng.random((steps, blocks)).astype(np.float32)
    if sure:
        chances = chances.round()
    sites = np.sort(rng.integers(0, 3, size=blocks))
    correction = _learned(chances, ran, np.unique(sites, return_inverse=True)[1])
    posterior = correction.start(chances[0])
    for value in rng.random(blocks) < 0.5:
        told = posterior.chances
        assert np.isfinite(told).all()
        assert ((told >= 0) & (told <= 1)).all()
        posterior.observe(bool(value))
    assert set(posterior.chances.tolist()) <= {0.0, 1.0}


def test_what_is_said_of_a_step_is_not_taught_by_it() -> None:
    rng = np.random.default_rng(0)
    ran = rng.random((16, 12)) < 0.5
    chances = np.full(ran.shape, 0.5, np.float32)
    folds = np.arange(16) // 4
    _, calibrated = learn_correction(chances, ran, SITES, folds)
    changed = ran.copy()
    changed[folds == 2] = ~changed[folds == 2]
    _, again = learn_correction(chances, changed, SITES, folds)
    assert np.array_equal(calibrated[folds == 2], again[folds == 2])
    assert not np.array_equal(calibrated[folds != 2], again[folds != 2])


def test_good_hints_do_not_make_the_model_unheard_where_there_are_none() -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.05, 0.95, size=(400, 12))
    ran = rng.random(truth.shape) < truth
    hints = np.where(rng.random(ran.shape) < 0.02, ~ran, ran).astype(np.float32)
    correction = _learned(truth.astype(np.float32), ran, SITES, _ahead(hints))
    unhinted = np.stack([correction.start(row.astype(np.float32)).chances for row in truth])
    assert np.abs(unhinted - truth).mean() < 0.05
