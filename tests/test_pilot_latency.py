"""One prediction takes at most a millisecond of one core, for the largest steps promised.

The time is the thread's own, which another process on the core does not lengthen.
"""

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
        start = time.thread_time()
        pilot.predict(example.sample)
        alone.append(time.thread_time() - start)
        start = time.thread_time()
        assert learner.predict(example.sample) is not None
        following.append(time.thread_time() - start)
        start = time.thread_time()
        learner.observe(example.sample, example.blocks)
        watching.append(time.thread_time() - start)
    assert np.median(alone) < MILLISECOND
    assert np.median(following) < MILLISECOND
    assert np.median(watching) < 2 * MILLISECOND


def test_trees_of_200_nodes() -> None:
    vocabulary, examples = trees(30, largest=200)
    pilot = fit_pilot(vocabulary, examples)
    seconds = []
    for example in examples * 4:
        start = time.thread_time()
        pilot.predict(example.sample)
        seconds.append(time.thread_time() - start)
    assert np.median(seconds) < MILLISECOND


def test_comparing_two_orders_of_400_blocks() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.integers(390, size=400).tolist() for _ in range(2))
    start = time.thread_time()
    for _ in range(20):
        edit_distance(first, second)
    assert (time.thread_time() - start) / 20 < MILLISECOND
