"""What is each model's own: histories, and blocks that no training saw."""

from __future__ import annotations

import numpy as np
import pytest

from dynoffload.pilot.features import MAX_SITES, site_stops
from dynoffload.pilot.markov import HORIZON, MAX_ORDER, Markov, learn_markov
from dynoffload.pilot.sequence import SiteSequence
from dynoffload.pilot.sequence_training import train_sequence
from dynoffload.profiler.input_features import InputFeatures

NOBODY = InputFeatures({})


def _chain(steps: int, slots: int, back: int, seed: int = 0) -> np.ndarray:
    """Return steps in which a slot runs as the one ``back`` before it did, nine times in ten."""
    rng = np.random.default_rng(seed)
    ran = rng.random((steps, slots)) < 0.5
    for slot in range(back, slots):
        kept = rng.random(steps) < 0.9
        ran[:, slot] = np.where(kept, ran[:, slot - back], ran[:, slot])
    return ran


def _groups(steps: int) -> list[str]:
    return [f"f{step % 8}" for step in range(steps)]


@pytest.mark.parametrize("back", [1, 3])
def test_markov_looks_back_as_far_as_it_pays(back: int) -> None:
    ran = _chain(600, 20, back)
    model = learn_markov(ran, _groups(600))
    assert model.order == back
    fresh = _chain(50, 20, back, seed=1)
    right = [(model.given(step[:10].tolist())[10] > 0.5) == step[10] for step in fresh]
    assert np.mean(right) > 0.85


def test_markov_without_history_is_how_often_each_runs() -> None:
    rng = np.random.default_rng(0)
    share = np.linspace(0.1, 0.9, 12)
    ran = rng.random((800, 12)) < share
    model = learn_markov(ran, _groups(800))
    assert model.order == 0
    assert model.probabilities(NOBODY) == pytest.approx(share, abs=0.06)


def test_markov_carries_chances_as_all_histories_would() -> None:
    rng = np.random.default_rng(0)
    model = Markov(2, rng.random((5, 4)).astype(np.float32))
    expected = np.zeros(5)
    for path in range(32):
        ran = [bool(path >> slot & 1) for slot in range(5)]
        chance = 1.0
        for slot in range(5):
            history = sum(int(ran[slot - b]) << (b - 1) for b in (1, 2) if slot >= b)
            runs = float(model.table[slot, history])
            chance *= runs if ran[slot] else 1 - runs
        expected += chance * np.array(ran)
    assert model.probabilities(NOBODY) == pytest.approx(expected, abs=1e-5)
    told = model.given([True, False])
    assert told[:2].tolist() == [1.0, 0.0]
    assert told[2] == pytest.approx(float(model.table[2, 0b10]))


def test_markov_of_many_slots_looks_no_farther_than_its_horizon() -> None:
    ran = _chain(60, 3 * HORIZON, 1)
    model = learn_markov(ran, _groups(60))
    told = model.given([True])
    assert np.array_equal(told[HORIZON + 1 :], model.probabilities(NOBODY)[HORIZON + 1 :])
    assert model.order <= MAX_ORDER


def _echoes(steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return steps of five sites with four blocks: one is drawn, the others run the same."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(4, size=steps)
    present = np.zeros((steps, 20), dtype=np.bool_)
    for site in range(5):
        present[np.arange(steps), 4 * site + chosen] = True
    return present, np.repeat(np.arange(5), 4)


def test_the_sequence_follows_what_ran() -> None:
    present, sites = _echoes(400, 0)
    described = np.zeros((20, 9), np.float32)
    samples = [InputFeatures({}) for _ in range(400)]
    net, _ = train_sequence(samples, present, described, sites, seed=0)
    fresh, _ = _echoes(40, 1)
    for step in fresh:
        rest = net.rest(NOBODY)(step[:4].tolist())
        assert ((rest > 0.5) == step).all()
    assert net.probabilities(NOBODY) == pytest.approx(0.25, abs=0.1)


def test_the_sequence_is_stored_and_damage_is_refused() -> None:
    present, sites = _echoes(20, 0)
    samples = [InputFeatures({"x": float(step)}, np.arange(step % 4)) for step in range(20)]
    net, _ = train_sequence(samples, present, np.zeros((20, 9), np.float32), sites, seed=0)
    again = SiteSequence.load(net.document(), net.arrays(), 20)
    assert np.array_equal(again.probabilities(samples[3]), net.probabilities(samples[3]))
    for name in ("own", "described", "embedding"):
        arrays = dict(net.arrays())
        arrays[name] = arrays[name][:-1]
        with pytest.raises(ValueError, match=r"shape"):
            SiteSequence.load(net.document(), arrays, 20)
    with pytest.raises(ValueError, match="sites"):
        SiteSequence.load({**net.document(), "stops": [4, 4, 20]}, net.arrays(), 20)


def test_sites_of_a_deep_network_are_joined() -> None:
    stops = site_stops(np.arange(200))
    assert len(stops) == MAX_SITES
    assert stops[-1] == 200
    assert site_stops(np.array([0, 0, 1, 2, 2])) == (2, 3, 5)
