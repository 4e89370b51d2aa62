"""Pilots over the zoo: what is recorded, and how it is scored and judged."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dynoffload.experiments import zoo
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.pilot_accuracy import Params, PilotAccuracy, judged
from dynoffload.experiments.pilot_recording import CASES, DATA, STRUCTURE, Recording, record
from dynoffload.experiments.pilot_scores import BASELINES, scores, steering
from dynoffload.experiments.zoo import ALL, FUSED
from dynoffload.pilot.fit import fit_pilot
from dynoffload.profiler.input_features import InputFeatures

SAMPLES = 24


def test_every_network_that_is_dynamic_in_blocks_is_a_case() -> None:
    assert {case.network for case in CASES.values()} == set(ALL) - {FUSED}
    assert {case.origin for case in CASES.values()} == {STRUCTURE, DATA}


@pytest.fixture(scope="module")
def gan() -> Recording:
    return record(CASES["gan"], SAMPLES, 1)


def test_a_recording_is_of_all_steps_in_order(gan: Recording) -> None:
    drawn = list(islice(zoo.samples("gan", "train", seed=1), SAMPLES))
    assert [one.source for one in gan.examples] == [one.source for one in drawn]
    for example, one in zip(gan.examples, drawn, strict=True):
        assert example.sample.values["unrolled"] == one.args[2]
    assert len(gan.learned) + len(gan.scored) == SAMPLES
    assert not {one.source for one in gan.learned} & {one.source for one in gan.scored}


def test_scores_are_those_of_the_pilot_and_the_baselines(gan: Recording) -> None:
    found = scores(gan, 0)
    for name in BASELINES:
        accuracy = found["baselines"][name]["block_order_accuracy"]
        assert accuracy < found["pilot"]["block_order_accuracy"]
    assert found["pilot"]["artifact_bytes"] > 1000
    json.dumps(found, allow_nan=False)


def test_a_pilot_that_steers_learns_from_every_step_what_has_changed(gan: Recording) -> None:
    """Of a network that takes one path early and another late, a pilot of the early steps is
    corrected by those between the held-out ones."""
    short, long = ([0, 2], [0, 1, 2])
    same = [replace(one, sample=InputFeatures({})) for one in gan.examples]
    mixed = [replace(one, blocks=long if n % 4 else short) for n, one in enumerate(same)]
    pilot = fit_pilot(gan.vocabulary, mixed)
    examples = [replace(one, blocks=short) for one in same] * 4
    held = list(range(3 * SAMPLES, 4 * SAMPLES, 4))
    drifted = replace(gan, examples=examples, held_out=held)
    assert pilot.predict(examples[-1].sample).blocks == long
    assert steering(pilot, drifted).whole_order == 1.0


def _scored(order: float) -> dict[str, Any]:
    return {"block_order_accuracy": order, "whole_order": order, "varying_order": order}


def _seed(order: float, ahead: float, other: float = 0.5) -> dict[str, Any]:
    """Return one seed's scores: alone the pilot is worse by 0.1."""
    costs = {"latency_s": 5e-4, "artifact_bytes": 10_000, "training_s": 2.0}
    steering = {"steering": _scored(order), "one_ahead": ahead}
    return {
        "paths": 9,
        "pilot": {**_scored(order - 0.1), **steering, **costs},
        "baselines": {name: _scored(other) for name in BASELINES},
    }


def test_a_network_is_judged_by_its_mean_and_shows_its_spread() -> None:
    found = judged(DATA, [_seed(0.92, 0.98), _seed(0.90, 0.97), _seed(0.89, 0.97)])
    order = found["pilot"]["order"]
    assert (order["min"], order["max"]) == (0.89, 0.92)
    assert found["pilot"]["alone"]["max"] == pytest.approx(0.82)
    assert found["reached"]
    assert found["beats_baselines"]
    assert found["costs"]
    assert not judged(DATA, [_seed(0.92, 0.96)])["reached"]
    assert not judged(STRUCTURE, [_seed(0.98, 1.0)])["reached"]
    assert judged(STRUCTURE, [_seed(0.995, 1.0)])["reached"]


def test_a_pilot_must_beat_every_baseline_at_every_seed() -> None:
    assert judged(DATA, [_seed(0.8, 0.9, other=0.7), _seed(0.8, 0.9)])["beats_baselines"]
    found = judged(DATA, [_seed(0.8, 0.9, other=0.85), _seed(0.8, 0.9)])
    assert found["beats_baselines"] is False
    one_path = {**_seed(0.8, 0.9, other=0.85), "paths": 1}
    assert judged(DATA, [one_path])["beats_baselines"] is None


def test_the_experiment_runs_and_tells_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.json"
    params = Params(only=("gan",), seeds=1, samples=24)
    found = carry_out(PilotAccuracy, params, path)
    (row,) = found["rows"]
    assert row["train_samples"] + row["held_out_samples"] == 24
    assert found["summary"]["networks"]["gan"]["beats_baselines"]
    assert found["summary"]["asked"]["beats_baselines"]["held"] == 1
    assert "unrolled GAN" in capsys.readouterr().out
    assert "decision known" in path.with_suffix(".svg").read_text()
