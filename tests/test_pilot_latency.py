"""One prediction takes at most a millisecond on one core, for the largest steps promised."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import numpy as np
import pytest

from dynoffload.pilot.distance import edit_distance
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.models import KINDS
from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import Pilot

_synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_pilot.py")))
routed, trees = _synthetic["routed"], _synthetic["trees"]

pytestmark = pytest.mark.alone

MILLISECOND = 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_384_experts_at_64_tokens(kind: str, tmp_path: Path) -> None:
    vocabulary, examples = routed(24, tokens=64, experts=64, layers=6, codes=256)
    fit_pilot(vocabulary, examples, model=kind).save(tmp_path / "x.pilot")
    pilot = Pilot.load(tmp_path / "x.pilot")
    learner = OnlineLearner(vocabulary, pilot=pilot, grow=False)
    alone, following, watching = [], [], []
    for example in examples * 5:
        alone.append(pilot.predict(example.sample).seconds)
        prediction = learner.predict(example.sample)
        assert prediction is not None
        following.append(prediction.seconds)
        start = time.perf_counter()
        learner.observe(example.sample, example.blocks)
        watching.append(time.perf_counter() - start)
    assert np.median(alone) < MILLISECOND
    assert np.median(following) < MILLISECOND
    assert np.median(watching) < 2 * MILLISECOND


def test_trees_of_200_nodes() -> None:
    vocabulary, examples = trees(30, largest=200)
    pilot = fit_pilot(vocabulary, examples)
    seconds = [pilot.predict(example.sample).seconds for example in examples * 4]
    assert np.median(seconds) < MILLISECOND


def test_comparing_two_orders_of_400_blocks() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.integers(390, size=400).tolist() for _ in range(2))
    start = time.perf_counter()
    for _ in range(20):
        edit_distance(first, second)
    assert (time.perf_counter() - start) / 20 < MILLISECOND
