"""Scores of predictors and trackers on watched steps, which they see in order.

Before a step, a predictor is scored by block-order accuracy, and by which blocks it names among
those that vary. Within a step, a tracker is scored one block ahead. What a router says of the
decision at hand is kept from it: who computed the router knows the decision already.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from dynoffload.experiments.predictors import Online
from dynoffload.experiments.watched import Watched
from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.features import BlockHint, Example


class Tracker(Protocol):
    """Follows one step; see `dynoffload.pilot.tracking`."""

    decided: bool
    """Whether the expectation may have changed since the last `expect`."""

    def observe(self, block: int) -> None:
        """Record that a block ran."""

    def hint(self, blocks: Sequence[int], values: Sequence[float]) -> None:
        """Record a routing hint."""

    def expect(self) -> tuple[list[int], Any]:
        """Return the expected rest of the order, and the chance of each block."""


@dataclass(frozen=True)
class Scores:
    """Scores over a range of steps; NaN where nothing is to be scored.

    Attributes:
        order: mean block-order accuracy before the step.
        recall: share of the varying blocks that ran which were predicted.
        precision: share of the varying blocks that were predicted which ran.
        recall_bytes: recall, with blocks weighted by their bytes.
        precision_bytes: precision, with blocks weighted by their bytes.
        missed_bytes: bytes per step of varying blocks that ran and were not predicted.
        wasted_bytes: bytes per step of varying blocks that were predicted and did not run.
        ahead: mean share of a step's blocks that the tracker expected next.
        ahead_varying: share of the varying blocks that the tracker expected next.
    """

    order: float
    recall: float
    precision: float
    recall_bytes: float
    precision_bytes: float
    missed_bytes: float
    wasted_bytes: float
    ahead: float
    ahead_varying: float


def score(
    watched: Watched,
    predictor: Online,
    steps: range,
    follow: Callable[[Example], Tracker] | None = None,
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
    known: Counter[int] = Counter()
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
                hits = one_ahead(follow(example), example, varying)
                ahead.append(hits.total() / max(1, len(example.blocks)))
                known += Counter({b: n for b, n in hits.items() if b in varying})
        predictor.observe(example)

    def weight(blocks: Counter[int]) -> int:
        return sum(count * nbytes[block] for block, count in blocks.items())

    return Scores(
        order=fmean(orders),
        recall=_share(right.total(), ran.total()),
        precision=_share(right.total(), named.total()),
        recall_bytes=_share(weight(right), weight(ran)),
        precision_bytes=_share(weight(right), weight(named)),
        missed_bytes=weight(ran - right) / len(orders),
        wasted_bytes=weight(named - right) / len(orders),
        ahead=fmean(ahead) if ahead else math.nan,
        ahead_varying=_share(known.total(), ran.total()) if ahead else math.nan,
    )


def one_ahead(tracker: Tracker, example: Example, varying: Container[int]) -> Counter[int]:
    """Return how often each block was expected next when the block before it had begun.

    Args:
        tracker: of the step, at its start.
        example: the step.
        varying: the network's varying blocks.
    """
    hints = hints_ahead(example, varying)
    right: Counter[int] = Counter()
    expected, at, given = tracker.expect()[0], 0, 0
    for place, block in enumerate(example.blocks):
        while given < len(hints) and hints[given].place <= place:
            tracker.hint(hints[given].blocks, hints[given].values)
            given += 1
        if tracker.decided:
            expected, at = tracker.expect()[0], 0
        hit = at < len(expected) and expected[at] == block
        right[block] += hit
        tracker.observe(block)
        if hit:
            at += 1
        else:
            expected, at = tracker.expect()[0], 0
    return right


def hints_ahead(example: Example, varying: Container[int]) -> list[BlockHint]:
    """Return a step's hints but those about the decision at hand.

    A hint is ahead if another decision lies between it and the first of its blocks: a varying block
    that it is not about, or a later hint about the same blocks.
    """
    found = []
    for number, hint in enumerate(example.hints):
        about, rest = set(hint.blocks), example.blocks[hint.place :]
        begins = next((place for place, block in enumerate(rest) if block in about), None)
        end = len(rest) if begins is None else begins
        again = any(
            later.place <= hint.place + end and about.intersection(later.blocks)
            for later in example.hints[number + 1 :]
        )
        others = any(block in varying and block not in about for block in rest[:end])
        if again or (others and begins is not None):
            found.append(hint)
    return found


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
