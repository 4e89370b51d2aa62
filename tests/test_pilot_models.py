"""The models learn which blocks run, from whole steps, and leave the host program alone."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
from exactness import Twin, footprint_of, needs_pager, small, small_loss, small_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_work import times_reference
from synthetic_pilot import routed, trees
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import PilotError
from dynoffload.pilot.association import learn_association
from dynoffload.pilot.correction import COLUMNS, SOURCES, Correction, Posterior, learn_correction
from dynoffload.pilot.evaluate import score
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import train_pilot
from dynoffload.pilot.trees import MAX_LEAVES, Trees
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.safefile import LARGEST_WEIGHT


def test_a_factor_from_a_damaged_file_is_refused_or_does_not_overflow() -> None:
    """A stranger's factor may be as large as weights may be; no learned one has so small a
    diagonal."""
    size = 12
    sites = np.zeros(size, dtype=np.int64)
    blend = np.zeros((1, SOURCES, COLUMNS), dtype=np.float32)
    factor = np.triu(np.full((size, size), LARGEST_WEIGHT), 1)
    arrays = {"correction_factor": factor, "correction_blend": blend}
    for smallest in (0.0, 1e-40, 6e-8):
        np.fill_diagonal(factor, smallest)
        with pytest.raises(ValueError, match="factor"):
            Correction.load(arrays, sites)
    np.fill_diagonal(factor, 0.031)
    posterior = Posterior(Correction.load(arrays, sites), np.full(size, 0.5, dtype=np.float32))
    with np.errstate(all="raise"):
        for number in range(size):
            posterior.observe(number % 3 == 0)
        assert np.isfinite(posterior._mean).all()


def test_association_blames_the_code_and_not_its_neighbours() -> None:
    # Code 0 runs the block. Code 1 stands beside it two times out of three, but is innocent.
    rng = np.random.default_rng(0)
    samples, present = [], []
    for _ in range(400):
        guilty = rng.random() < 0.5
        codes = [int(guilty) * 10, *(rng.integers(20, 40, size=6).tolist())]
        if rng.random() < (2 / 3 if guilty else 0.2):
            codes.append(1)
        rng.shuffle(codes)
        samples.append(InputFeatures({}, np.stack([codes, np.zeros(len(codes), int)], axis=1)))
        present.append([guilty])
    association = learn_association(samples, np.array(present))
    one = [InputFeatures({}, np.array([[code, 0]])) for code in (10, 1)]
    guilty_chance, innocent_chance = (-np.expm1(association.evidence(s)[0])[0] for s in one)
    assert guilty_chance > 0.9
    assert innocent_chance < 0.1


def test_a_model_learns_from_the_numbers_of_samples_without_elements() -> None:
    # An early exit: as many stages run as the number says.
    vocabulary, _ = routed(1)
    rng = np.random.default_rng(0)
    examples = []
    for step in range(300):
        depth = int(rng.integers(1, 8))
        values = {"depth": float(depth), "noise": float(rng.random())}
        examples.append(Example(InputFeatures(values), list(range(depth + 1)), f"f{step % 9}"))
    pilot = fit_pilot(vocabulary, examples[:200])
    found = score(lambda e: pilot.predict(e.sample).blocks, examples[200:])
    assert found.block_order_accuracy > 0.97


def test_learning_leaves_the_random_numbers_of_the_program_alone() -> None:
    vocabulary, examples = routed(40)
    before = (torch.get_rng_state().clone(), np.random.get_state()[1].copy(), random.getstate())
    threads = torch.get_num_threads()
    fit_pilot(vocabulary, examples)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    assert torch.get_num_threads() == threads


def test_what_tables_memorised_is_not_trusted() -> None:
    """Codes are those of three steps alone and blocks run by chance: tables fitted on a step's own
    label would look like a perfect feature."""
    vocabulary, _ = routed(1)
    rng = np.random.default_rng(0)
    examples = []
    for step in range(180):
        sample = InputFeatures({}, np.arange(6) + 6 * (step // 3))
        order = np.flatnonzero(rng.random(8) < 0.3).tolist()
        examples.append(Example(sample, order, f"f{step}"))
    pilot = fit_pilot(vocabulary, examples)
    known = np.stack([pilot.chances(example.sample) for example in examples])
    assert known.mean() == pytest.approx(0.3, abs=0.1)
    assert known.std() < 0.15


def test_confidence_is_given_for_each_block_and_tells_sure_from_unsure() -> None:
    vocabulary, examples = routed(200, noise=0.15)
    pilot = fit_pilot(vocabulary, examples[:150])
    hits, misses = [], []
    for example in examples[150:]:
        prediction = pilot.predict(example.sample)
        assert prediction.confidence is not None
        assert len(prediction.confidence) == len(prediction.blocks)
        for block, chance in zip(prediction.blocks, prediction.confidence, strict=True):
            (hits if block in example.blocks else misses).append(float(chance))
    assert np.mean(hits) > np.mean(misses) + 0.1


def test_what_cannot_be_learned_from_is_refused() -> None:
    vocabulary, examples = routed(10)
    with pytest.raises(PilotError, match="at least 2"):
        fit_pilot(vocabulary, examples[:1])
    _, wide = routed(10, experts=99)
    with pytest.raises(PilotError, match="do not fit the vocabulary"):
        fit_pilot(vocabulary, wide)


@pytest.mark.parametrize(
    "make", [lambda: routed(60, noise=0.1), lambda: trees(40)], ids=["model", "rule"]
)
def test_a_pilot_predicts_the_same_after_the_file(make: Callable[[], Any], tmp_path: Path) -> None:
    vocabulary, examples = make()
    pilot = fit_pilot(vocabulary, examples)
    path = tmp_path / "x.pilot"
    pilot.save(path)
    again = Pilot.load(path)
    assert again.vocabulary == vocabulary
    assert (again.template, again.threshold) == (pilot.template, pilot.threshold)
    assert (again.varying, again.most_frequent) == (pilot.varying, pilot.most_frequent)
    for example in examples:
        np.testing.assert_array_equal(pilot.chances(example.sample), again.chances(example.sample))
        assert pilot.predict(example.sample).blocks == again.predict(example.sample).blocks
    again.save(tmp_path / "y.pilot")
    assert (tmp_path / "y.pilot").read_bytes() == path.read_bytes()
    assert json.loads(json.dumps(again.card)) == pilot.card


# How far to believe what: the correction

SITES = np.repeat(np.arange(4), 3)


def test_overconfident_chances_are_calibrated() -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.2, 0.8, size=(500, 12))
    ran = rng.random(truth.shape) < truth
    odds = 4 * np.log(truth / (1 - truth))
    said = (1 / (1 + np.exp(-odds))).astype(np.float32)
    correction = learn_correction(said, ran, SITES, np.arange(500) % 4)[0]
    calibrated = np.stack([Posterior(correction, chances).chances for chances in said])
    assert np.abs(calibrated - truth).mean() < 0.05 < np.abs(said - truth).mean()


def test_hints_at_hand_are_believed_on_their_own_and_by_their_side() -> None:
    """Those given ahead are noise; those at hand lie just above or below a half, and are right."""
    rng = np.random.default_rng(0)
    ran = rng.random((400, 12)) < 0.4
    ahead = rng.random(ran.shape).astype(np.float32)
    at_hand = np.where(ran, 0.51, 0.49).astype(np.float32)
    chances = np.full(ran.shape, 0.4, np.float32)
    hints = np.stack((ahead, at_hand), axis=2)
    correction, _ = learn_correction(chances, ran, SITES, np.arange(400) % 4, hints)
    posterior = Posterior(correction, np.full(12, 0.4, np.float32))
    posterior.hint(np.arange(6), np.array([0.9, 0.1, 0.9, 0.1, 0.9, 0.1], np.float32))
    assert posterior.chances[:6] == pytest.approx(0.4, abs=0.15)
    posterior.hint(np.arange(3), np.array([0.51, 0.49, 0.49], np.float32), at_hand=True)
    assert ((posterior.chances[:3] > 0.5) == [True, False, False]).all()
    assert np.abs(posterior.chances[:3] - 0.5).min() > 0.4
    assert posterior.chances[3:6] == pytest.approx(0.4, abs=0.15)
    assert posterior.chances[6:] == pytest.approx(0.4, abs=0.15)  # without a hint, the model's


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


# Trees as arrays give LightGBM's own scores, bit for bit

FEATURES = 6


def trained(seed: int, **more: Any) -> tuple[lightgbm.Booster, np.ndarray]:
    """Return a booster, and the rows that it was trained on: numbers, steps, zeros, a constant."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(2000, FEATURES)).astype(np.float32)
    rows[:, 2] = np.round(rows[:, 2], 1)
    rows[:, 3] = np.maximum(rows[:, 3], 0)
    rows[:, 4] = 1.0
    truth = rows[:, 0] * rows[:, 1] + rows[:, 2] + rows[:, 3] > rng.normal(size=2000) * 0.3
    options = {"objective": "binary", "num_leaves": 15, "verbosity": -1, "num_threads": 1}
    data = lightgbm.Dataset(rows, truth.astype(np.float32))
    return lightgbm.train({**options, "learning_rate": 0.2, **more}, data, 24), rows


def predicted(trees: Trees, rows: np.ndarray) -> np.ndarray:
    masks = trees.every_leaf(len(rows))
    for column in trees.bins:
        masks &= trees.leaves(column, rows[:, column])
    return trees.score(masks)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_lightgbms_at_and_beside_every_threshold(seed: int) -> None:
    booster, rows = trained(seed)
    trees = Trees.of_booster(booster)
    assert set(trees.bins) == {0, 1, 2, 3, 5}  # the constant says nothing
    tried = [rows]
    extremes = np.array([0, -0.0, 1e-30, -1e-30, 3e38, -3e38], np.float32)
    for column, (edges, _) in trees.bins.items():
        up, down = (np.nextafter(edges, np.float32(way * np.inf)) for way in (1, -1))
        values = np.concatenate((edges, up, down, extremes))
        values = values[(values == 0) | (abs(values) > 1.1e-35)]  # LightGBM takes others for 0
        near = rows[np.arange(len(values)) % len(rows)].copy()
        near[:, column] = values
        tried.append(near)
    every = np.concatenate(tried)
    expected = booster.predict(every, raw_score=True, num_threads=1)
    assert np.array_equal(predicted(trees, every), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(2, MAX_LEAVES), st.integers(1, 400))
def test_trees_of_any_size_come_back_as_they_were(seed: int, leaves: int, least: int) -> None:
    booster, rows = trained(seed, num_leaves=leaves, min_data_in_leaf=least)
    trees = Trees.load(Trees.of_booster(booster).arrays(), FEATURES)
    assert np.array_equal(predicted(trees, rows), booster.predict(rows, raw_score=True))


def test_counts_of_thresholds_that_overflow_are_refused() -> None:
    arrays = Trees.of_booster(trained(0)[0]).arrays()
    arrays["tree_edges"][:4] += 2**62  # their sum in 64 bits is what it was
    with pytest.raises(ValueError, match="thresholds missing"):
        Trees.load(arrays, FEATURES)


# Samples of another kind than those of the training


@pytest.fixture(scope="module")
def shown() -> Pilot:
    vocabulary, examples = routed(40)
    values = {"rows": 1.0, "length": 2.0}
    told = [replace(one, sample=InputFeatures(values, one.sample.elements)) for one in examples]
    return fit_pilot(vocabulary, told)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (InputFeatures({"rows": 2.0}, np.array([1, 2])), ""),
        (InputFeatures({"rows": 2.0, "length": 3.0}, np.array([1, 2])), ""),
        (InputFeatures({"rows": 2.0}, np.array([[1, 2]])), "1 codes to an element, not 2"),
        (InputFeatures({"rows": 2.0}), "1 codes to an element, not 0"),
        (InputFeatures({"rows": 2.0, "depth": 1.0}, np.array([1])), "numbers without 'depth'"),
        (InputFeatures({}, np.array([1])), "numbers, such as 'length'"),
    ],
)
def test_what_is_not_as_in_training_is_told(sample: InputFeatures, said: str, shown: Pilot) -> None:
    assert shown.unlike(sample) == said


@pytest.mark.parametrize("seen", [None, 7, {}, {"values": 3}, {"values": [], "columns": [[1]]}])
def test_a_card_of_any_kind_is_lived_with(seen: Any, shown: Pilot) -> None:
    pilot = replace(shown, card={"seen": seen})
    assert isinstance(pilot.unlike(InputFeatures({"rows": 1.0})), str)


@needs_pager
@pytest.mark.parametrize("same", [True, False])
def test_a_session_says_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, same: bool
) -> None:
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    samples = small_samples(8, seed=1)

    def features(x: Any) -> dict[str, float]:
        return {"first": float(x.sum())}

    dynoffload.profile(
        twin.reference,
        [SimpleNamespace(args=(tokens,)) for tokens, _ in samples],
        out=tmp_path,
        loss=lambda output, _: output.float().mean(),
        features=features,
        progress=False,
    )
    pilot = train_pilot(tmp_path, progress=False).pilot
    config = {"features": features} if same else {}
    with caplog.at_level(logging.WARNING):
        with twin.paged(footprint_of(twin.model) // 3, pilot=pilot, config=config):
            for sample in samples[:3]:
                small_loss(twin.model, sample).backward()
                twin.optimizer.step()
                twin.optimizer.zero_grad()
    assert caplog.text.count("trained on samples that show something else") == (not same)


@pytest.mark.alone
def test_384_experts_at_64_tokens(tmp_path: Path) -> None:
    """Alone, following the steps, and learning from one: a prediction takes about as long as a
    fixed piece of numpy work, which took a millisecond where the limit was set."""
    rounds = 48  # twice all samples
    vocabulary, examples = routed(24, tokens=64, experts=64, layers=6, codes=256)
    fit_pilot(vocabulary, examples).save(tmp_path / "x.pilot")
    pilot = Pilot.load(tmp_path / "x.pilot")
    learner = OnlineLearner(vocabulary, pilot=pilot, grow=False)
    stream: Iterator[Example] = cycle(examples)
    assert times_reference(lambda: pilot.predict(next(stream).sample), rounds) < 1
    assert times_reference(lambda: learner.predict(next(stream).sample), rounds) < 1

    def watch() -> None:
        example = next(stream)
        learner.observe(example.sample, example.blocks)

    assert times_reference(watch, rounds) < 2
    assert learner.predict(examples[0].sample) is not None
