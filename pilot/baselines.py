"""The baselines a pilot must beat: the last order again, and the one order that fits best.

The session's own "repeat" policy is the runtime's; Markov is a kind of model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.features import Example
from dynoffload.pilot.template import learn_template, tokens
from dynoffload.planning.blocks import Block

TUNING_SAMPLES = 200
"""Training samples that the most frequent order's threshold is chosen on."""


class LastOrder:
    """Predicts what the last sample ran."""

    def __init__(self, first: Sequence[int] = ()) -> None:
        """Start from an order, or from none."""
        self._last = list(first)

    def __call__(self, example: Example) -> Sequence[int]:
        """Return the order of the example before, then remember this one's."""
        answer = self._last
        self._last = [block for block in example.blocks if block >= 0]
        return answer


def most_frequent_order(orders: Sequence[Sequence[int]], blocks: Sequence[Block]) -> list[int]:
    """Return one order for all samples: the best of some, judged on the training samples.

    One is the order seen most often (the first of equals); the others hold, in canonical order, the
    blocks that more than a share of the samples run.

    Args:
        orders: of the training samples, at least one.
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
