"""Offline training: makes a pilot and its scores from a directory of traces.

`train_pilot` holds out whole sources. It and `evaluate_pilot` score the pilot and the baselines it
must beat on the same samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from dynoffload.errors import PilotError
from dynoffload.pilot.evaluate import (
    LastOrder,
    Scores,
    most_frequent_order,
    one_ahead,
    score,
    varying_blocks,
)
from dynoffload.pilot.features import Example
from dynoffload.pilot.labels import Label, encode_example, label_traces
from dynoffload.pilot.pilot import Pilot, shown_by
from dynoffload.pilot.progress import Report, progress_bar
from dynoffload.pilot.sources import split_by_source
from dynoffload.pilot.workers import one_thread
from dynoffload.planning.blocks import Vocabulary
from dynoffload.planning.cutting import build_vocabulary

logger = logging.getLogger(__name__)

HOLDOUT = 0.25
"""Share of the samples that scores are measured on."""
_DIGITS = 16  # digits kept of a trace's digest


@dataclass(frozen=True)
class Evaluation:
    """Scores of a pilot and of the baselines on the same samples.

    Attributes:
        pilot: predictions before the step; the pilot learns from each step after it.
        last_order: repeating the order of the previous sample.
        most_frequent: the one order that fits the training samples best.
        one_ahead: share of the blocks predicted correctly when the previous block ran, with the
            prediction updated during the step; mean over samples.
        latency_s: median seconds of one prediction.
        slow_s: seconds that one of twenty predictions takes at least.
        trained_on: number of the samples that the pilot was trained on.
    """

    pilot: Scores
    last_order: Scores
    most_frequent: Scores
    one_ahead: float
    latency_s: float
    slow_s: float
    trained_on: int = 0

    def rows(self) -> dict[str, Scores]:
        """Return the scores by the predictor's name, as a table's rows."""
        return {
            "pilot": self.pilot,
            "last order": self.last_order,
            "most frequent": self.most_frequent,
        }


@dataclass(frozen=True)
class TrainResult:
    """Result of a training job.

    Attributes:
        pilot: the pilot, trained on the sources that were not held out.
        evaluation: scores on the held-out sources.
        train_samples: number of samples the pilot was trained on.
        seconds: duration of the job, including reading.
    """

    pilot: Pilot
    evaluation: Evaluation
    train_samples: int
    seconds: float


def train_pilot(
    traces: str | Path,
    *,
    budget: int | None = None,
    holdout: float = HOLDOUT,
    seed: int = 0,
    progress: bool = True,
    jobs: int | None = None,
) -> TrainResult:
    """Train a pilot on a directory of traces and score it on sources it has not seen.

    The same traces and seed give the same pilot, byte for byte, whatever the number of processes.

    Args:
        traces: directory that `dynoffload profile` wrote; its ``*.trace`` files are read.
        budget: bytes of fast memory that limit the blocks' size; None to cut by structure alone.
        holdout: share of the samples held out, in whole sources, between 0 and 1.
        seed: makes the result reproducible.
        progress: show a bar on stderr once the job has taken two seconds.
        jobs: processes that label the traces, as `dynoffload.pilot.workers.run_tasks` takes them;
            None for those of `joblib.parallel_config`, which may be a cluster's.

    Raises:
        TraceError: if there is no trace, some cannot be read, or they are of several networks.
        PilotError: if there are too few traces.
    """
    if not 0 < holdout < 1:
        raise PilotError(f"holdout is a share between 0 and 1, not {holdout}")
    start = perf_counter()
    with progress_bar(progress) as report, one_thread():
        labels = label_traces(traces, jobs, report)
        if len(labels) < 4:
            raise PilotError(
                f"{traces}: {len(labels)} traces are too few to learn from and to score on; "
                "profile at least 4 steps, better some hundreds"
            )
        inside, aside = split_by_source([label.source for label in labels], holdout, seed)
        learned = sorted(_short_digest(labels[i]) for i in inside)
        report("cutting blocks")
        vocabulary = build_vocabulary([labels[i].calls for i in inside], budget)
        examples = [encode_example(vocabulary, labels[i]) for i in inside]
        held_out = [encode_example(vocabulary, labels[i]) for i in aside]
        del labels
        pilot = learn_pilot(vocabulary, examples, report)
        pilot.card |= {"traces": learned, "seed": seed}
        report("scoring")
        evaluation = evaluate(pilot, held_out)
    seconds = perf_counter() - start
    logger.info(
        "pilot learned from %d samples in %.1f s: block-order accuracy %.3f on %d held out",
        len(inside),
        seconds,
        evaluation.pilot.block_order_accuracy,
        len(aside),
    )
    return TrainResult(pilot, evaluation, len(inside), seconds)


def evaluate_pilot(
    pilot: Pilot, traces: str | Path, *, progress: bool = True, jobs: int | None = None
) -> Evaluation:
    """Score a pilot on a directory of traces.

    Raises:
        TraceError: if there is no trace, some cannot be read, or they are of several networks.
        PilotError: if the traces are of another network than the pilot's.
    """
    with progress_bar(progress) as report, one_thread():
        labels = label_traces(traces, jobs, report)
        pilot.check(labels[0].calls.network)
        report("scoring")
        examples = [encode_example(pilot.vocabulary, label) for label in labels]
        known = pilot.card.get("traces")
        learned = set(map(str, known)) if isinstance(known, list) else set()
        again = sum(_short_digest(label) in learned for label in labels)
        return replace(evaluate(pilot, examples), trained_on=again)


def _short_digest(label: Label) -> str:
    """Return the identifier of a trace in the card of a pilot trained on it."""
    return label.digest[:_DIGITS]


def learn_pilot(
    vocabulary: Vocabulary, examples: Sequence[Example], report: Report = lambda *_: None
) -> Pilot:
    """Return a pilot that has observed some steps, in order.

    Args:
        vocabulary: the network's blocks.
        examples: the steps.
        report: receives progress.

    Raises:
        PilotError: an order names a block that is not in the vocabulary, or they have too many
            places for blocks.
    """
    orders = [example.blocks for example in examples]
    if max((block for order in orders for block in order), default=-1) >= len(vocabulary):
        raise PilotError(
            f"the recorded orders do not fit the vocabulary of {len(vocabulary)} blocks: "
            "build the vocabulary from the same traces"
        )
    pilot = Pilot(vocabulary)
    for done, example in enumerate(examples):
        report("learning", done, len(examples))
        pilot.observe(example.sample, example.blocks, example.hints)
        if pilot.due:
            pilot.consolidate()
    pilot.consolidate()
    pilot.card = {
        "samples": len(examples),
        "sources": len({example.source for example in examples}),
        "seen": shown_by([example.sample for example in examples]),
        "most_frequent": most_frequent_order(orders, vocabulary.blocks) if orders else [],
        "varying": sorted(varying_blocks(orders, len(vocabulary))),
    }
    return pilot


def evaluate(pilot: Pilot, examples: Sequence[Example]) -> Evaluation:
    """Score a pilot and the baselines on samples, in the order given. The pilot is not changed."""
    pilot = deepcopy(pilot)
    times: list[float] = []
    ahead: list[float] = []

    def follow(example: Example) -> list[int]:
        prediction = pilot.predict(example.sample)
        times.append(prediction.seconds)
        assert pilot.tracker is not None
        ahead.append(one_ahead(pilot.tracker, example))
        pilot.observe(example.sample, example.blocks)
        if pilot.due:
            pilot.consolidate()
        return prediction.blocks

    known = range(len(pilot.vocabulary))
    frequent, varying = (
        [block for block in _numbers(pilot.card.get(name)) if block in known]
        for name in ("most_frequent", "varying")
    )
    chosen = frozenset(varying)
    return Evaluation(
        pilot=score(follow, examples, chosen),
        last_order=score(LastOrder(frequent), examples, chosen),
        most_frequent=score(lambda _: frequent, examples, chosen),
        one_ahead=float(np.mean(ahead)),
        latency_s=float(np.median(times)),
        slow_s=float(np.quantile(times, 0.95)),
    )


def _numbers(value: Any) -> list[int]:
    """Return the integers of a list in a card, which a stranger may have written."""
    return [one for one in value if type(one) is int] if isinstance(value, list) else []
