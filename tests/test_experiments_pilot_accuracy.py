"""Pilots over the zoo: what is recorded, and how it is scored and judged."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import pilot_recording, zoo
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.pilot_accuracy import Params, PilotAccuracy, judged
from dynoffload.experiments.pilot_cases import CASES, DATA, STRUCTURE
from dynoffload.experiments.pilot_recording import MOMENTS, Recording, record
from dynoffload.experiments.pilot_scores import (
    BASELINES,
    PARTS,
    RecordedOrder,
    agreement,
    chosen_kind,
    repeated_ahead,
    scores,
    steering,
)
from dynoffload.experiments.zoo import ALL, FUSED
from dynoffload.pilot import fit
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.profiler.input_features import InputFeatures

SAMPLES = 24
DEPTHS = replace(CASES["depths"], before=12)


def test_every_network_that_is_dynamic_in_blocks_is_a_case() -> None:
    assert {case.network for case in CASES.values()} == set(ALL) - {FUSED}
    assert {case.origin for case in CASES.values()} == {STRUCTURE, DATA}


# Baselines


def _followed(orders: list[list[int]]) -> list[tuple[list[int], float]]:
    record = RecordedOrder()
    return [(list(record(Example(InputFeatures({}), one))), record.ahead(one)) for one in orders]


def test_a_recorded_order_is_followed_until_a_step_departs_from_it_and_then_recorded_anew() -> None:
    a, b = [0, 1, 2, 3], [0, 1, 4, 3]
    assert _followed([a, a, b, b, b, a]) == [
        ([], 0.0),
        (a, 1.0),
        (a, 0.5),  # the record is gone with the first departure
        ([], 0.0),
        (b, 1.0),
        (b, 0.5),
    ]


def test_a_recorded_order_that_ends_early_is_left_too() -> None:
    assert _followed([[0, 1], [0], [0], [0]]) == [([], 0.0), ([0, 1], 1.0), ([], 0.0), ([0], 1.0)]


def test_a_repeated_order_finds_its_place_again() -> None:
    assert repeated_ahead([0, 1, 2, 3], [0, 1, 2, 3]) == 1.0
    assert repeated_ahead([0, 1, 2, 3], [0, 2, 3]) == pytest.approx(2 / 3)
    assert repeated_ahead([0, 2, 3], [0, 1, 2, 3]) == pytest.approx(3 / 4)
    assert repeated_ahead([], [0, 1]) == repeated_ahead([5], [0, -1]) == 0.0


# Recordings


@pytest.fixture(scope="module")
def slim() -> Recording:
    return record(CASES["slim"], SAMPLES, 1)


@pytest.fixture(scope="module")
def depths() -> Recording:
    return record(DEPTHS, SAMPLES, 1)


def test_a_recording_is_of_all_steps_in_order(slim: Recording) -> None:
    drawn = list(islice(zoo.samples("slim", "train", seed=1), SAMPLES))
    assert [one.source for one in slim.examples] == [one.source for one in drawn]
    for example, one in zip(slim.examples, drawn, strict=True):
        assert example.sample.values["groups"] == one.args[1]
    assert len(slim.learned) + len(slim.scored) == SAMPLES
    assert not {one.source for one in slim.learned} & {one.source for one in slim.scored}


def test_every_held_out_sample_runs_again_near_its_own_step(depths: Recording) -> None:
    assert sorted(one.step for one in depths.again) == sorted(depths.held_out)
    assert max(one.apart for one in depths.again) <= SAMPLES / MOMENTS
    assert {one.apart for one in depths.again} != {0}
    found = agreement(depths)
    assert found["near"]["steps_apart"] <= found["far"]["steps_apart"]
    assert 0.5 < found["all"]["block_order_accuracy"] <= 1


def test_a_path_that_the_sample_alone_decides_is_the_same_at_any_moment(slim: Recording) -> None:
    assert agreement(slim)["all"]["whole_order"] == 1.0


def test_running_samples_again_leaves_the_training_as_it_is(
    depths: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot_recording, "MOMENTS", 1)
    other = record(DEPTHS, SAMPLES, 1)
    assert {one.apart for one in other.again} != {one.apart for one in depths.again}
    assert other.examples == depths.examples


# Scores


def test_scores_are_those_of_the_kinds_and_the_baselines(slim: Recording) -> None:
    found = scores(slim, 0, ("markov", "lightgbm"))
    assert set(found["kinds"]) == {"markov", "lightgbm"}
    assert found["chosen"] == "lightgbm"  # a history knows nothing of the sample's width
    for name in BASELINES:
        accuracy = found["baselines"][name]["block_order_accuracy"]
        assert accuracy < found["kinds"]["lightgbm"]["block_order_accuracy"]
    assert len(found["curve"]) == len(PARTS) + 1
    assert found["curve"][-1]["samples"] == found["train_samples"]
    assert found["kinds"]["lightgbm"]["artifact_bytes"] > 1000
    assert found["kinds"]["lightgbm"]["steering"]["block_order_accuracy"] > accuracy
    json.dumps(found, allow_nan=False)


def test_a_pilot_that_steers_learns_from_every_step_what_has_changed(depths: Recording) -> None:
    """Of a network that takes one path early and another late, a pilot of the early steps is
    corrected by those between the held-out ones."""
    short, long = ([0, 1, 3], [0, 1, 2, 3])
    mixed = [replace(one, blocks=long if n % 4 else short) for n, one in enumerate(depths.examples)]
    pilot = fit_pilot(depths.vocabulary, mixed, model="markov")
    examples = [replace(one, blocks=short) for one in depths.examples] * 4
    held = list(range(3 * SAMPLES, 4 * SAMPLES, 4))
    drifted = replace(depths, examples=examples, held_out=held)
    assert pilot.predict(examples[-1].sample).blocks == long
    assert steering(pilot, drifted).whole_order == 1.0


def test_the_chosen_kind_is_the_one_that_auto_takes(
    depths: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("markov", "lightgbm")
    monkeypatch.setattr(fit, "AUTO_KINDS", kinds)
    found = scores(depths, 0, kinds)
    assert found["chosen"] == fit_pilot(depths.vocabulary, depths.learned, seed=0).kind
    assert chosen_kind(found["kinds"]) == found["chosen"]


# Verdicts


def _scored(order: float) -> dict[str, Any]:
    return {
        "block_order_accuracy": order,
        "whole_order": order,
        "byte_weighted": order,
        "site_f1": None,
    }


def _seed(order: float, ahead: float, kind: str = "sequence", other: float = 0.5) -> dict[str, Any]:
    """Return one seed's scores: alone every predictor is worse by 0.1."""
    costs = {
        "latency_s": 5e-4,
        "latency_p95_s": 2e-3,
        "artifact_bytes": 10_000,
        "training_s": 2.0,
    }

    def ends(steering: float, ahead: float) -> dict[str, Any]:
        alone = _scored(steering - 0.1)
        return {**alone, "steering": _scored(steering), "one_ahead": ahead, **costs}

    agreed = {"steps_apart": 3.0, "block_order_accuracy": 0.97, "whole_order": 0.5}
    return {
        "paths": 9,
        "chosen": kind,
        "kinds": {kind: ends(order, ahead), "markov": ends(other, other)},
        "baselines": {name: {**_scored(other), "one_ahead": other} for name in BASELINES},
        "curve": [{"samples": count, **ends(order, ahead)} for count in (45, 90, 180, 360)],
        "again": {"all": agreed, "near": agreed, "far": None},
    }


def test_a_network_is_judged_by_its_mean_and_shows_its_spread() -> None:
    found = judged(DATA, [_seed(0.92, 0.98), _seed(0.90, 0.97), _seed(0.89, 0.97)])
    order = found["pilot"]["order"]
    assert (order["min"], order["max"]) == (0.89, 0.92)
    assert found["pilot"]["alone"]["max"] == pytest.approx(0.82)
    assert found["reached"]
    assert found["beats_baselines"]
    assert found["costs"]
    assert found["best_kind"] == {"kind": "sequence", "order": pytest.approx(0.9033, abs=1e-4)}
    assert not judged(DATA, [_seed(0.92, 0.96)])["reached"]
    assert not judged(STRUCTURE, [_seed(0.98, 1.0)])["reached"]
    assert judged(STRUCTURE, [_seed(0.995, 1.0)])["reached"]


def test_a_pilot_must_beat_every_baseline_at_every_seed() -> None:
    assert judged(DATA, [_seed(0.8, 0.9, other=0.7), _seed(0.8, 0.9)])["beats_baselines"]
    found = judged(DATA, [_seed(0.8, 0.9, other=0.85), _seed(0.8, 0.9)])
    assert found["beats_baselines"] is False
    one_path = {**_seed(0.8, 0.9, other=0.85), "paths": 1}
    assert judged(DATA, [one_path])["beats_baselines"] is None


# The whole


def test_the_experiment_runs_and_tells_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.json"
    params = Params(only=("slim",), seeds=1, samples=24, kinds=("lightgbm",))
    found = carry_out(PilotAccuracy, params, path)
    (row,) = found["rows"]
    assert row["train_samples"] + row["held_out_samples"] == 24
    assert found["summary"]["networks"]["slim"]["beats_baselines"]
    assert found["summary"]["asked"]["beats_baselines"]["held"] == 1
    assert "slimmable, 4 widths" in capsys.readouterr().out
    assert "decision known" in path.with_suffix(".svg").read_text()


@pytest.mark.parametrize(
    ("options", "said_of_it"),
    [
        ({"only": ("moe_63",)}, "moe_64"),
        ({"seeds": 0}, "seeds=0"),
        ({"samples": 4}, "at least 1 and 16"),
        ({"kinds": ("oracle",)}, "lightgbm"),
        ({"kinds": ()}, "no kind of pilot"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], said_of_it: str) -> None:
    with pytest.raises(ConfigError, match=said_of_it):
        PilotAccuracy(Params(**options)).cases()
