"""Scores of predicted block orders, and the baselines a pilot must beat.

Block-order accuracy of one sample is 1 - Levenshtein(predicted, true) / max(length), over the
training vocabulary; a block unknown to it (-1) is always wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein

from dynoffload.pilot.features import Example
from dynoffload.pilot.template import learn_template, tokens
from dynoffload.pilot.tracking import StepTracker
from dynoffload.planning.blocks import Block

TUNING_SAMPLES = 200
"""Training samples used to choose the most frequent order's threshold."""

Predictor = Callable[[Example], Sequence[int]]


@dataclass(frozen=True)
class Scores:
    """Scores of a predictor on held-out samples. Shares are between 0 and 1.

    Attributes:
        samples: number of samples scored.
        block_order_accuracy: mean over samples.
        varying_order: the same over the blocks whose presence or place varies in training; NaN
            if there are none.
        whole_order: share of samples predicted without any error.
    """

    samples: int
    block_order_accuracy: float
    varying_order: float
    whole_order: float

    def to_json(self) -> dict[str, float]:
        """Return the scores by name."""
        return asdict(self)


def block_order_accuracy(predicted: Sequence[int], true: Sequence[int]) -> float:
    """Return 1 - Levenshtein / max(length); 1 for two empty orders. A true -1 is always wrong."""
    longest = max(len(predicted), len(true))
    if not longest:
        return 1.0
    return 1.0 - Levenshtein.distance([-2 if b < 0 else b for b in predicted], true) / longest


class LastOrder:
    """Predicts the order of the previous sample."""

    def __init__(self, first: Sequence[int] = ()) -> None:
        """Start from a given order, by default an empty one."""
        self._last = list(first)

    def __call__(self, example: Example) -> Sequence[int]:
        """Return the previous example's order, then remember this one's."""
        answer = self._last
        self._last = [block for block in example.blocks if block >= 0]
        return answer


def most_frequent_order(orders: Sequence[Sequence[int]], blocks: Sequence[Block]) -> list[int]:
    """Return one fixed order: the candidate with the best accuracy on the training samples.

    One candidate is the most frequent order (the first of equals). Each other one holds, in
    canonical order, the blocks that at least a given share of the samples run.

    Args:
        orders: orders of the training samples, at least one.
        blocks: the vocabulary's blocks.
    """
    known = [tuple(b for b in order if b >= 0) for order in orders]
    candidates: list[list[int]] = [list(Counter(known).most_common(1)[0][0])]
    template = learn_template(known, blocks)
    filled = [tokens(order, template.families) for order in known]
    runs = {slot: Counter(f[slot] for f in filled if slot in f) for slot in template.slots}
    shares = {slot: sum(count.values()) / len(known) for slot, count in runs.items()}
    for percent in range(10, 80, 5):
        chosen = [slot for slot in template.slots if shares[slot] >= percent / 100]
        order = [b for slot in chosen for b in runs[slot].most_common(1)[0][0]]
        if order not in candidates:
            candidates.append(order)
    tried = known[:: max(1, len(known) // TUNING_SAMPLES)]
    return max(candidates, key=lambda order: sum(block_order_accuracy(order, t) for t in tried))


def varying_blocks(orders: Sequence[Sequence[int]], blocks: int = 0) -> frozenset[int]:
    """Return the blocks whose presence or place varies between orders.

    A block keeps its place if every order contains it equally often and its place among the blocks
    of constant count is always the same.

    Args:
        orders: orders of training samples.
        blocks: size of the vocabulary; blocks that no order has, such as a cell with shapes not
            seen in training, count as varying.
    """
    if not orders:
        return frozenset()
    every = {block for order in orders for block in order if block >= 0}
    counts = [Counter(order) for order in orders]
    steady = {b for b in every if len({count[b] for count in counts}) == 1}
    kept = np.array([[b for b in order if b in steady] for order in orders])
    moved = set(kept[:, (kept != kept[0]).any(axis=0)].ravel().tolist())
    return frozenset((every | set(range(blocks))) - (steady - moved))


def score(
    predict: Predictor, examples: Sequence[Example], varying: frozenset[int] = frozenset()
) -> Scores:
    """Score a predictor on samples in the order given.

    Args:
        predict: called with each example in turn; it must use the sample only. (It gets the
            example so that a baseline can remember its order after predicting.)
        examples: held-out samples, at least one.
        varying: `varying_blocks` of the training orders.
    """
    pairs = [(predict(example), example.blocks) for example in examples]
    accuracy = [block_order_accuracy(predicted, true) for predicted, true in pairs]
    chosen = [
        ([b for b in predicted if b in varying], [b for b in true if b < 0 or b in varying])
        for predicted, true in pairs
    ]
    of_varying = [block_order_accuracy(*pair) for pair in chosen if any(pair)]
    return Scores(
        len(examples),
        float(np.mean(accuracy)),
        float(np.mean(of_varying)) if of_varying else float("nan"),
        float(np.mean([one == 1.0 for one in accuracy])),
    )


def one_ahead(step: StepTracker, example: Example) -> float:
    """Return the share of a step's blocks predicted correctly when the previous block ran.

    Hints about the next decision are left out: they show what is decided, and predict nothing.
    """
    expected, right, hints = step.expect()[0], 0, deque(example.hints)
    for place, block in enumerate(example.blocks):
        while hints and hints[0].place <= place:
            hint = hints.popleft()
            if not step.at_hand(hint.blocks):
                step.hint(hint.blocks, hint.values)
        if step.decided:
            expected = step.expect()[0]
        right += expected[:1] == [block]
        step.observe([block])
        expected = expected[1:] if expected[:1] == [block] else step.expect()[0]
    return right / max(len(example.blocks), 1)
