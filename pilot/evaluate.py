"""Scores of predicted block orders: of one order, and of a predictor over many samples.

Block-order accuracy of one sample is 1 - Levenshtein(predicted, true) / max(length), over the
training vocabulary; a block unknown to it (-1) is always wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein

from dynoffload.pilot.features import Example, site_name
from dynoffload.pilot.tracking import StepTracker
from dynoffload.planning.blocks import Block

if TYPE_CHECKING:
    from dynoffload.pilot.pilot import Pilot

Predictor = Callable[[Example], Sequence[int]]

COLUMNS = ("order", "by bytes", "whole order", "choices F1")
"""Headers of the shares of `Scores`, as tables show them."""
LEGEND = (
    "order: share of the blocks in the right order (1 - edit distance). By bytes: the same over "
    "the blocks that vary, weighted by size. Whole order: share of steps without an error. Choices "
    "F1: of the set of blocks chosen at each module where that varies. Online: corrected after "
    "each step by what it ran."
)
PREDICTORS = {
    "pilot": "pilot",
    "pilot, following": "pilot, online",
    "last order": "repeat-last",
    "most frequent": "most frequent order",
}
"""How tables name the rows of an evaluation."""


@dataclass(frozen=True)
class Scores:
    """How good a predictor is on held-out samples. Shares are between 0 and 1.

    Attributes:
        samples: how many samples were scored.
        block_order_accuracy: mean over samples.
        byte_weighted: the same over the blocks whose presence or place varies in training, each
            edit weighing the block's bytes; NaN where no block varies.
        whole_order: share of samples whose whole order is right.
        site_f1: F1 of the set of blocks at each site with a varying block, mean over the sites a
            sample or its prediction visits, then over samples; NaN where no block varies.
    """

    samples: int
    block_order_accuracy: float
    byte_weighted: float
    whole_order: float
    site_f1: float

    def to_json(self) -> dict[str, float]:
        """Return the scores by name."""
        return asdict(self)


def block_order_accuracy(predicted: Sequence[int], true: Sequence[int]) -> float:
    """Return 1 - Levenshtein / max(length); 1 for two empty orders. A true -1 is always wrong."""
    longest = max(len(predicted), len(true))
    if not longest:
        return 1.0
    return 1.0 - Levenshtein.distance([-2 if b < 0 else b for b in predicted], true) / longest


def byte_weighted_accuracy(
    predicted: Sequence[int],
    true: Sequence[int],
    blocks: Sequence[Block],
    varying: frozenset[int],
) -> float:
    """Return block-order accuracy over the varying blocks, each weighing its bytes.

    Insertions and deletions cost the block's bytes (parameters and activations), a substitution
    the larger of the two; the cost is divided by the bytes of the heavier order. Unknown blocks
    weigh the mean. NaN where neither order has a varying block.
    """
    weights = np.array([max(b.nbytes + b.activation_bytes, 1) for b in blocks], dtype=np.float64)
    first = [b for b in predicted if b in varying]
    second = [b for b in true if b < 0 or b in varying]
    unknown = float(weights.mean())
    heaviest = max(
        sum(weights[b] if b >= 0 else unknown for b in order) for order in (first, second)
    )
    if not heaviest:
        return float("nan")
    return float(1.0 - weighted_edit_distance(first, second, weights) / heaviest)


def weighted_edit_distance(
    first: Sequence[int], second: Sequence[int], weights: npt.NDArray[np.float64]
) -> float:
    """Return the least total weight of edits between two orders.

    Inserting or deleting block ``b`` costs ``weights[b]``, a substitution the larger of the two
    weights. A negative block is unknown to the vocabulary and costs the mean weight. (Libraries
    weigh edits by their kind alone.)

    Args:
        first: indices into ``weights``, or negative.
        second: the same.
        weights: cost per block, ``[blocks]``, none negative; at least one block.
    """
    codes = np.asarray(second, dtype=np.int64)
    by_code = np.append(weights, weights.mean())
    rows, columns = (by_code[np.maximum(order, -1)] for order in (np.array(first, int), codes))
    across = np.concatenate([[0.0], np.cumsum(columns)])
    line = across.copy()
    for block, cost in zip(first, rows, strict=True):
        best = line + cost
        swap = np.where((codes == block) & (codes >= 0), 0.0, np.maximum(columns, cost))
        best[1:] = np.minimum(best[1:], line[:-1] + swap)
        # A run of insertions: best[j] = min over i <= j of best[i] + across[j] - across[i].
        line = np.minimum.accumulate(best - across) + across
    return float(line[-1])


def site_f1(
    predicted: Sequence[int],
    true: Sequence[int],
    blocks: Sequence[Block],
    varying: frozenset[int],
) -> float:
    """Return the mean F1 of the predicted set of blocks per site; NaN where no site is visited."""
    found: dict[str, tuple[set[int], set[int]]] = {}
    for side, order in enumerate((predicted, true)):
        for block in order:
            if block in varying:
                found.setdefault(site_name(blocks[block]), (set(), set()))[side].add(block)
    if not found:
        return float("nan")
    return float(np.mean([2 * len(p & t) / (len(p) + len(t)) for p, t in found.values()]))


def varying_blocks(orders: Sequence[Sequence[int]], blocks: int = 0) -> frozenset[int]:
    """Return the blocks whose presence or place varies between orders.

    A block keeps its place when every order has it equally often and its place among the blocks
    of constant count is always the same.

    Args:
        orders: some.
        blocks: how many the vocabulary has; those that no order has, as a cell in shapes that were
            not met, are others' to run.
    """
    if not orders:
        return frozenset()
    every = {block for order in orders for block in order if block >= 0}
    counts = [Counter(order) for order in orders]
    steady = {b for b in every if len({count[b] for count in counts}) == 1}
    places: dict[int, set[tuple[int, ...]]] = {b: set() for b in steady}
    for order in orders:
        at: dict[int, list[int]] = {b: [] for b in steady}
        for place, block in enumerate(b for b in order if b in steady):
            at[block].append(place)
        for block, where in at.items():
            places[block].add(tuple(where))
    every |= set(range(blocks))
    return frozenset(every - {b for b, where in places.items() if len(where) == 1})


def score(
    predict: Predictor,
    examples: Sequence[Example],
    blocks: Sequence[Block],
    varying: frozenset[int],
) -> Scores:
    """Score a predictor on samples in the order given.

    Args:
        predict: called with each example in turn; it must look at the sample only. (It gets the
            example so that a baseline may remember its order after answering.)
        examples: held-out samples, at least one.
        blocks: the vocabulary's blocks.
        varying: `varying_blocks` of the training orders.
    """
    rows = []
    for example in examples:
        predicted = predict(example)
        accuracy = block_order_accuracy(predicted, example.blocks)
        rows.append(
            (
                accuracy,
                byte_weighted_accuracy(predicted, example.blocks, blocks, varying),
                float(accuracy == 1.0),
                site_f1(predicted, example.blocks, blocks, varying),
            )
        )
    columns = np.array(rows, dtype=np.float64)
    means = [
        float(np.mean(column[~np.isnan(column)])) if not np.isnan(column).all() else float("nan")
        for column in columns.T
    ]
    return Scores(len(examples), *means)


def one_ahead(pilot: Pilot, example: Example) -> float:
    """Return the share of a step's blocks that were foretold when the block before them ran."""
    step = StepTracker(pilot, example.sample)
    expected = step.remaining()
    hints = list(example.hints)
    right = 0
    for place, block in enumerate(example.blocks):
        while hints and hints[0].place <= place:
            hint = hints.pop(0)
            step.hint(hint.blocks, hint.values)
        if step.decided:
            expected = step.remaining()
        right += expected[:1] == [block]
        step.observe(block)
        expected = expected[1:] if expected[:1] == [block] else step.remaining()
    return right / max(len(example.blocks), 1)
