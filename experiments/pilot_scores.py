"""Scores of pilots and baselines on one recording.

The kind that is chosen is the one that ``model="auto"`` would take: the best by cross-validation
over the steps that are learned from, whose scores a pilot brings along. Held-out steps choose
nothing.

Baselines see every step of the training and are scored on the held-out ones. So does a pilot *as it
steers*: after each step it is corrected by what that ran, as a session's is. *Alone*, it knows the
sample only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from dynoffload.experiments.pilot_recording import Again, Recording
from dynoffload.experiments.trainer import finite
from dynoffload.pilot.baselines import LastOrder, most_frequent_order
from dynoffload.pilot.evaluate import (
    Scores,
    block_order_accuracy,
    one_ahead,
    score,
    varying_blocks,
)
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.models import KINDS
from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import RULE, Pilot
from dynoffload.pilot.train import evaluate

PARTS = (0.125, 0.25, 0.5)
"""Shares of the samples that a learning curve is taken at, before all of them."""
LEAST = 8
"""Samples that a point of a curve is learned from, at least."""
BASELINES = ("last_order", "most_frequent", "recorded_order")


class RecordedOrder:
    """Predicts what it has recorded, as long as samples follow that to the letter.

    A prefetcher of ZeRO-Infinity's kind (Rajbhandari et al., SC 2021): one sample is recorded, and
    nothing is known of it in advance; those after it are foretold by the record. The first that
    departs from it, earlier or later, loses its prefetch from there on, and the record; the sample
    after it is recorded anew. So it pays two samples for each change, where `LastOrder` pays one.
    The same rule, visit by visit, is `dynoffload.experiments.baselines.replay`.
    """

    def __init__(self) -> None:
        """Start without a record."""
        self._record: list[int] | None = None
        self._followed: list[int] | None = None

    def __call__(self, example: Example) -> Sequence[int]:
        """Return the record, nothing where there is none, then compare this example with it."""
        order = list(example.blocks)
        answer, self._followed = self._record, self._record
        if self._record is None:
            self._record = order
        elif self._record != order:
            self._record = None
        return [block for block in answer or () if block >= 0]

    def ahead(self, order: Sequence[int]) -> float:
        """Return the share of the blocks of the example called last that were foretold: those up to
        where it departed from the record."""
        right = 0
        for block, foretold in zip(order, self._followed or (), strict=False):
            if block != foretold or block < 0:
                break
            right += 1
        return right / max(len(order), 1)


def repeated_ahead(expected: Sequence[int], order: Sequence[int]) -> float:
    """Return the share of an order's blocks that another order foretold when the block before them
    ran.

    After a block that was not foretold, the next one is expected to be what follows the first place
    ahead at which the expected order has that block; where it has none, it waits where it is.

    Args:
        expected: what is repeated.
        order: what ran; a block below 0 is foretold by nothing.
    """
    place = right = 0
    for block in order:
        if place < len(expected) and expected[place] == block:
            right += 1
            place += 1
            continue
        try:
            place = expected.index(block, place) + 1
        except ValueError:
            continue
    return right / max(len(order), 1)


def scores(recording: Recording, seed: int, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Return what is said of a case at one seed.

    Args:
        recording: of the case.
        seed: of the pilots' training.
        kinds: of models.
    """
    learned, scored = recording.learned, recording.scored
    orders = {tuple(example.blocks) for example in recording.examples}
    found: dict[str, Any] = {
        "train_samples": len(learned),
        "held_out_samples": len(scored),
        "held_out_sources": len({example.source for example in scored}),
        "blocks": len(recording.vocabulary),
        "paths": len(orders),
        "blocks_of_a_step": float(np.mean([len(one.blocks) for one in recording.examples])),
        "baselines": baselines(recording),
        "kinds": {},
    }
    for kind in kinds:
        begin = perf_counter()
        pilot = fit_pilot(recording.vocabulary, learned, model=kind, seed=seed)
        seconds = perf_counter() - begin
        found["kinds"][pilot.kind] = {**_scores(pilot, recording), "training_s": seconds}
        if pilot.kind == RULE:
            break  # the template says it all, whichever kind is asked for
    found["chosen"] = chosen = chosen_kind(found["kinds"])
    kind = kinds[0] if chosen == RULE else chosen
    found["curve"] = [
        *(_point(recording, seed, kind, share) for share in PARTS),
        {"samples": len(learned), **_ends(found["kinds"][chosen])},
    ]
    found["again"] = agreement(recording)
    return found


def chosen_kind(kinds: dict[str, Any]) -> str:
    """Return which of the kinds cross-validation chose, the first of equals."""
    return max(kinds, key=lambda kind: kinds[kind]["validation"] or 0.0)


def _scores(pilot: Pilot, recording: Recording) -> dict[str, Any]:
    evaluation = evaluate(pilot, recording.scored)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pilot"
        pilot.save(path)
        nbytes = path.stat().st_size
    return {
        **_numbers(evaluation.pilot.to_json()),
        "one_ahead": evaluation.one_ahead,
        "steering": _numbers(steering(pilot, recording).to_json()),
        "validation": pilot.card.get("validation_accuracy", {}).get(pilot.kind),
        "latency_s": evaluation.latency_s,
        "latency_p95_s": evaluation.latency_p95_s,
        "artifact_bytes": nbytes,
    }


def steering(pilot: Pilot, recording: Recording) -> Scores:
    """Return a pilot's scores on the held-out steps, where it follows all steps, one by one."""
    learner = OnlineLearner(pilot.vocabulary, pilot=pilot, grow=False)
    told: list[list[int]] = []
    for example in recording.examples:
        prediction = learner.predict(example.sample)
        assert prediction is not None
        told.append(prediction.blocks)
        learner.observe(example.sample, example.blocks)
    held = iter([told[step] for step in recording.held_out])
    blocks = pilot.vocabulary.blocks
    return score(lambda _: next(held), recording.scored, blocks, pilot.varying)


def _point(recording: Recording, seed: int, kind: str, share: float) -> dict[str, Any]:
    """Return how a kind does when it learns from a share of the samples, spread over the training:
    the same ones for a seed, and those of a smaller share are among those of a larger."""
    learned = recording.learned
    count = min(max(LEAST, round(share * len(learned))), len(learned))
    drawn = np.random.default_rng(seed).permutation(len(learned))[:count]
    part = [learned[i] for i in sorted(drawn.tolist())]
    pilot = fit_pilot(recording.vocabulary, part, model=kind, seed=seed)
    blocks, scored = recording.vocabulary.blocks, recording.scored
    made = score(lambda one: pilot.predict(one.sample).blocks, scored, blocks, pilot.varying)
    steered = _numbers(steering(pilot, recording).to_json())
    ahead = float(np.mean([one_ahead(pilot, example) for example in scored]))
    return {
        "samples": count,
        **_ends({**_numbers(made.to_json()), "steering": steered, "one_ahead": ahead}),
    }


def _ends(found: dict[str, Any]) -> dict[str, Any]:
    keys = ("block_order_accuracy", "whole_order", "steering", "one_ahead")
    return {key: found[key] for key in keys}


def baselines(recording: Recording) -> dict[str, Any]:
    """Return the baselines' scores on the held-out steps; see `dynoffload.pilot.baselines`."""
    learned = [example.blocks for example in recording.learned]
    frequent = most_frequent_order(learned, recording.vocabulary.blocks)
    last, record = LastOrder(frequent), RecordedOrder()
    aside = set(recording.held_out)
    told: dict[str, list[Sequence[int]]] = {name: [] for name in BASELINES}
    ahead: dict[str, list[float]] = {name: [] for name in BASELINES}
    for step, example in enumerate(recording.examples):
        foretold = {
            "last_order": list(last(example)),
            "most_frequent": frequent,
            "recorded_order": list(record(example)),
        }
        if step not in aside:
            continue
        for name, order in foretold.items():
            told[name].append(order)
            by_record = name == "recorded_order"
            ahead[name].append(
                record.ahead(example.blocks) if by_record else repeated_ahead(order, example.blocks)
            )
    varying = varying_blocks(learned, len(recording.vocabulary))
    result = {}
    for name, orders in told.items():
        stream = iter(orders)
        made = score(
            lambda _, stream=stream: next(stream),  # type: ignore[misc]
            recording.scored,
            recording.vocabulary.blocks,
            varying,
        )
        result[name] = {**_numbers(made.to_json()), "one_ahead": float(np.mean(ahead[name]))}
    return result


def agreement(recording: Recording) -> dict[str, Any]:
    """Return how the held-out samples' orders agree with those of the same samples at other moments
    of the training, over all of them and over the nearer and the farther half."""
    ordered = sorted(recording.again, key=lambda one: one.apart)
    half = len(ordered) // 2
    return {
        "all": _agree(recording, ordered),
        "near": _agree(recording, ordered[:half]),
        "far": _agree(recording, ordered[half:]),
    }


def _agree(recording: Recording, again: Sequence[Again]) -> dict[str, Any] | None:
    if not again:
        return None
    pairs = [(one.blocks, recording.examples[one.step].blocks) for one in again]
    alike = [block_order_accuracy(first, second) for first, second in pairs]
    return {
        "samples": len(again),
        "steps_apart": float(np.mean([one.apart for one in again])),
        "block_order_accuracy": float(np.mean(alike)),
        "whole_order": float(np.mean([one == 1.0 for one in alike])),
    }


def _numbers(found: dict[str, float]) -> dict[str, Any]:
    return {name: finite(value) for name, value in found.items()}
