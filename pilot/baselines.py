"""The baselines a pilot must beat.

What it is: `LastOrder`, which repeats the order of the sample before; `RecordedOrder`, which
records one and follows it to the letter or not at all; and `MostFrequent`, which always predicts
what samples mostly run. `repeated_ahead` and `RecordedOrder.ahead` tell how the next block is
foretold by such an order while the step runs. What it is not: a fallback; the session's own policy
"repeat" is in the runtime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.features import Example
from dynoffload.pilot.skeleton import learn_skeleton, tokens
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


class RecordedOrder:
    """Predicts what it has recorded, as long as samples follow that to the letter.

    A prefetcher of ZeRO-Infinity's kind (Rajbhandari et al., SC 2021): one sample is recorded, and
    nothing is known of it in advance; those after it are foretold by the record. The first that
    departs from it, earlier or later, loses its prefetch from there on, and the record; the sample
    after it is recorded anew. So it pays two samples for each change, where `LastOrder` pays one.
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


class MostFrequent:
    """Predicts one order for all samples: the better of two, judged on the training samples.

    One is the order seen most often (the first of equals); the other holds, in canonical order, the
    blocks that more than a share of the samples run, with the share that scores best.
    """

    def __init__(self, orders: Sequence[Sequence[int]], blocks: Sequence[Block]) -> None:
        """Choose the order.

        Args:
            orders: of the training samples, at least one.
            blocks: the vocabulary's blocks.
        """
        known = [tuple(b for b in order if b >= 0) for order in orders]
        candidates: list[list[int]] = [list(Counter(known).most_common(1)[0][0])]
        skeleton = learn_skeleton(known, blocks)
        filled = [tokens(order, skeleton.families) for order in known]
        runs = {slot: Counter(f[slot] for f in filled if slot in f) for slot in skeleton.slots}
        shares = {slot: sum(count.values()) / len(known) for slot, count in runs.items()}
        for percent in range(10, 80, 5):
            chosen = [slot for slot in skeleton.slots if shares[slot] >= percent / 100]
            order = [b for slot in chosen for b in runs[slot].most_common(1)[0][0]]
            if order not in candidates:
                candidates.append(order)
        tried = known[:: max(1, len(known) // TUNING_SAMPLES)]
        self.order = max(
            candidates, key=lambda order: sum(block_order_accuracy(order, t) for t in tried)
        )

    def __call__(self, example: Example) -> Sequence[int]:
        """Return the order."""
        return self.order
