"""Scores of predictors and trackers on watched steps, which they see in order.

Before a step, a predictor is scored by block-order accuracy, and by which blocks it names among
those that vary. Within a step, a tracker is scored one block ahead (`pilot.evaluate.one_ahead`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from dynoffload.experiments.predictors import Online
from dynoffload.experiments.watched import Watched
from dynoffload.pilot.evaluate import block_order_accuracy, one_ahead
from dynoffload.pilot.features import Example
from dynoffload.pilot.tracking import StepTracker


@dataclass(frozen=True)
class Scores:
    """Scores over a range of steps; NaN where nothing is to be scored.

    Attributes:
        order: mean block-order accuracy before the step.
        recall: share of the varying blocks that ran which were predicted.
        precision: share of the varying blocks that were predicted which ran.
        missed_bytes: bytes per step of varying blocks that ran and were not predicted.
        wasted_bytes: bytes per step of varying blocks that were predicted and did not run.
        ahead: mean share of a step's blocks that the tracker expected next.
    """

    order: float
    recall: float
    precision: float
    missed_bytes: float
    wasted_bytes: float
    ahead: float


def score(
    watched: Watched,
    predictor: Online,
    steps: range,
    follow: Callable[[Example], StepTracker] | None = None,
) -> Scores:
    """Let a predictor see the steps from the first on, and score it on some.

    Args:
        watched: the steps.
        predictor: predicts each step, then observes it.
        steps: the numbers of those to score, at least one.
        follow: returns a tracker of a step that was just predicted; None scores none.
    """
    varying = watched.varying
    nbytes = [block.nbytes for block in watched.vocabulary.blocks]
    orders: list[float] = []
    ahead: list[float] = []
    right: Counter[int] = Counter()
    ran: Counter[int] = Counter()
    named: Counter[int] = Counter()
    for number, example in enumerate(watched.examples[: steps.stop]):
        predicted = predictor.predict(example)
        if number in steps:
            orders.append(block_order_accuracy(predicted, example.blocks))
            here = Counter(block for block in example.blocks if block in varying)
            said = Counter(block for block in predicted if block in varying)
            right += here & said
            ran += here
            named += said
            if follow is not None:
                ahead.append(one_ahead(follow(example), example))
        predictor.observe(example)

    def weight(blocks: Counter[int]) -> int:
        return sum(count * nbytes[block] for block, count in blocks.items())

    return Scores(
        order=fmean(orders),
        recall=_share(right.total(), ran.total()),
        precision=_share(right.total(), named.total()),
        missed_bytes=weight(ran - right) / len(orders),
        wasted_bytes=weight(named - right) / len(orders),
        ahead=fmean(ahead) if ahead else math.nan,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
