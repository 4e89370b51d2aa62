"""Scores of a pilot and of baselines on one recording.

Baselines see every step of the training and are scored on the held-out ones. So is a pilot *as it
steers*: after each step it is corrected online by the executed order, as in a session. *Alone*, it
knows only the sample.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from dynoffload.experiments.pilot_recording import Recording
from dynoffload.experiments.trainer import finite
from dynoffload.pilot.evaluate import LastOrder, Scores, score
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import evaluate

BASELINES = ("last_order", "most_frequent")


def scores(recording: Recording, seed: int) -> dict[str, Any]:
    """Return the scores of a case at one seed of the pilot's training."""
    learned, scored = recording.learned, recording.scored
    begin = perf_counter()
    pilot = fit_pilot(recording.vocabulary, learned, seed=seed)
    seconds = perf_counter() - begin
    evaluation = evaluate(pilot, scored)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pilot"
        pilot.save(path)
        nbytes = path.stat().st_size
    baselines: dict[str, Callable[[Example], Sequence[int]]] = {
        "last_order": LastOrder(pilot.most_frequent),
        "most_frequent": lambda _: pilot.most_frequent,
    }
    return {
        "train_samples": len(learned),
        "held_out_samples": len(scored),
        "paths": len({tuple(example.blocks) for example in recording.examples}),
        "pilot": {
            **_numbers(evaluation.pilot),
            "one_ahead": evaluation.one_ahead,
            "steering": _numbers(steering(pilot, recording)),
            "latency_s": evaluation.latency_s,
            "artifact_bytes": nbytes,
            "training_s": seconds,
        },
        "baselines": {
            name: _numbers(_scored(predict, recording, pilot.varying))
            for name, predict in baselines.items()
        },
    }


def steering(pilot: Pilot, recording: Recording) -> Scores:
    """Return a pilot's scores on the held-out steps, with online correction after every step."""
    learner = OnlineLearner(pilot.vocabulary, pilot=pilot, grow=False)

    def follow(example: Example) -> Sequence[int]:
        prediction = learner.predict(example.sample)
        assert prediction is not None
        learner.observe(example.sample, example.blocks)
        return prediction.blocks

    return _scored(follow, recording, pilot.varying)


def _scored(
    predict: Callable[[Example], Sequence[int]], recording: Recording, varying: frozenset[int]
) -> Scores:
    """Return the held-out scores of a predictor that is called on all steps in order."""
    predictions = [predict(example) for example in recording.examples]
    held = iter([predictions[step] for step in recording.held_out])
    return score(lambda _: next(held), recording.scored, varying)


def _numbers(found: Scores) -> dict[str, Any]:
    return {name: finite(value) for name, value in found.to_json().items()}
