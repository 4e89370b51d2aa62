"""The models learn which blocks run, from whole steps, and leave the host program alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic_pilot import routed, trees

from dynoffload.errors import PilotError
from dynoffload.pilot.association import learn_association
from dynoffload.pilot.boosting import TrainingSet, train_tables
from dynoffload.pilot.evaluate import score
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.pilot import Pilot
from dynoffload.profiler.input_features import InputFeatures


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


def test_the_booster_does_not_trust_what_tables_memorised() -> None:
    # Codes are never seen twice and blocks run by chance: tables fitted on a step's own label
    # would look like a perfect feature. Cross-fitted, the booster stays near the prior.
    rng = np.random.default_rng(0)
    samples = [InputFeatures({}, np.arange(6) + 6 * (step // 3)) for step in range(180)]
    groups = [f"f{step}" for step in range(180)]
    present = rng.random((180, 8)) < 0.3
    described, sites = np.zeros((8, 1), np.float32), np.zeros(8, np.int64)
    tables = train_tables(TrainingSet(samples, present, groups, described, sites), 0)
    fresh = np.stack(
        [tables.probabilities(InputFeatures({}, np.arange(6) + 10_000)) for _ in range(3)]
    )
    known = np.stack([tables.probabilities(sample) for sample in samples])
    assert fresh.mean() == pytest.approx(0.3, abs=0.1)
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
