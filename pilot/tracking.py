"""Tracks a running step and updates the prediction of its remaining blocks.

`OrderTracker` repeats the last order but for the network's hints, without a pilot. `StepTracker`
observes each block as it runs, matches it to the template, updates the `Posterior` of
the optional blocks, and returns the expected rest of the order. It follows forward only, as
backward replays forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence

import numpy as np

from dynoffload.pilot.features import Floats
from dynoffload.pilot.loops import LoopModel
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.template import LOOP, Slot
from dynoffload.profiler.input_features import InputFeatures


class StepTracker:
    """Tracks one step.

    Args:
        pilot: the predictor.
        sample: the sample of the step.
        adjust: given P(runs) of the optional slots, returns them corrected for recent drift.

    Attributes:
        decided: whether the prediction may have changed since the last `expect`: an optional block
            was decided, a hint came, or a loop deviated from its prediction.
    """

    def __init__(
        self, pilot: Pilot, sample: InputFeatures, adjust: Callable[[Floats], Floats] | None = None
    ) -> None:
        self.decided = False
        self._adjust = adjust
        self._pilot, self._sample = pilot, sample
        self._template, self._bundles = pilot.template, pilot.bundle_of
        self._posterior = pilot.start(sample)  # None if the network has no optional blocks
        self._ran: list[bool] = []  # of the first bundles of optional slots
        self._passed = 0  # optional slots that are decided
        self._seen: Counter[int] = Counter()  # occurrences by block and by family code
        self._slot = -1  # the last slot, in canonical order, that ran
        self._family = -1  # family of the last block
        self._loop_model: LoopModel | None = None  # model of the current loop
        self._loop: list[int] = []  # blocks of the current loop so far
        self._expected: list[int] = []  # its predicted blocks

    def observe(self, block: int) -> None:
        """Record that a block ran; negative: a block unknown to the vocabulary."""
        family = self._template.family_of.get(block, -1)
        if family >= 0 and family == self._family:
            if self._loop_model is not None:
                self._continue_loop(block)
            return
        self._leave_loop()
        self._family = family
        if block < 0:
            return
        code = LOOP - family if family >= 0 else block
        slot: Slot = (code, self._seen[code])
        self._seen[code] += 1
        place = self._template.place_of.get(slot, -1)
        if place > self._slot:
            self._slot = place
            self._resolve(place)
        if place == self._slot and place in self._template.loops:
            self._loop_model = self._pilot.loops[self._template.loops.index(place)]
            self._expected = self._loop_model.predict(self._sample)
            self._continue_loop(block)

    def hint(self, blocks: Sequence[int], values: Sequence[float]) -> None:
        """Record a routing hint: probabilities, 0 to 1, of some coming blocks."""
        if self._posterior is None:
            return
        places: list[int] = []
        chances: list[float] = []
        for block, value in zip(blocks, values, strict=True):
            number = self._template.optional_number.get((block, self._seen[block]), -1)
            bundle = int(self._bundles[number]) if number >= 0 else -1
            if bundle >= len(self._ran):
                places.append(bundle)
                chances.append(value)
        if places:
            at_hand = min(places) == len(self._ran)
            hinted = np.array(chances, dtype=np.float32)
            self._posterior.hint(np.array(places), hinted, at_hand=at_hand)
            self.decided = True

    def remaining(self) -> list[int]:
        """Return the remaining blocks that are expected, in order."""
        return self.expect()[0]

    def expect(self) -> tuple[list[int], Floats]:
        """Return the expected remaining blocks and the probability of each, ``[blocks]``."""
        self.decided = False
        order: list[int] = []
        fidelity = 1.0
        if self._loop_model is not None:
            fidelity = self._loop_model.fidelity
            order = self._loop_model.predict(self._sample)[len(self._loop) :]
            self._expected = [*self._loop, *order]
        rest, confidence = self._pilot.decode(
            self._sample, self.chances, self._pilot.threshold, start=self._slot + 1
        )
        here = np.full(len(order), fidelity, dtype=np.float32)
        return order + rest, np.concatenate((here, confidence))

    @property
    def chances(self) -> Floats:
        """P(runs) of each optional slot, given the step so far."""
        if self._posterior is None:
            return np.zeros(0, dtype=np.float32)
        slots = self._posterior.chances[self._bundles]
        if self._adjust is None:
            return slots
        # Recent drift corrects the model's estimates, not hints from the network for this step.
        return np.where(self._posterior.hinted[self._bundles], slots, self._adjust(slots))

    def _leave_loop(self) -> None:
        """Leave the current loop: a block outside it ran."""
        self.decided |= len(self._expected) > len(self._loop)
        self._loop_model, self._loop, self._expected = None, [], []

    def _continue_loop(self, block: int) -> None:
        """Record another block of the current loop."""
        place = len(self._loop)
        self._loop.append(block)
        self.decided |= self._expected[place : place + 1] != [block]

    def _resolve(self, place: int) -> None:
        """Decide the optional slots up to ``place``: only that at ``place`` itself ran."""
        optional = self._template.optional
        passed = int(np.searchsorted(optional, place, side="right"))
        for number in range(self._passed, passed):
            if self._bundles[number] < len(self._ran):
                continue  # decided with the first slot of its bundle
            ran = int(optional[number]) == place
            if self._posterior is not None:
                self._posterior.observe(ran)
            self._ran.append(ran)
            self.decided = True
        self._passed = max(self._passed, passed)


class OrderTracker:
    """Tracks one step that is expected to run as the last one, but for what is hinted.

    Args:
        order: the last order.
        varying: blocks that hints are about.
        again: chance of one of these to run again.

    Attributes:
        decided: whether a hint came since the last `expect`.
    """

    def __init__(self, order: Sequence[int], varying: Container[int], again: float) -> None:
        self.decided = False
        self._rest, self._varying, self._again = list(order), varying, again
        self._hinted: dict[int, float] = {}

    def observe(self, block: int) -> None:
        """Record that a block ran; those expected before it are not any more."""
        if block in self._rest:
            del self._rest[: self._rest.index(block) + 1]

    def hint(self, blocks: Sequence[int], values: Sequence[float]) -> None:
        """Record a routing hint: it replaces those of its blocks that are still expected."""
        about = set(blocks)
        place = next((n for n, block in enumerate(self._rest) if block in about), None)
        if place is not None:
            after = [block for block in self._rest[place:] if block not in about]
            self._rest[place:] = [*blocks, *after]
            self._hinted.update(zip(blocks, values, strict=True))
            self.decided = True

    def expect(self) -> tuple[list[int], Floats]:
        """Return the remaining blocks in order, and the probability of each, ``[blocks]``."""
        self.decided = False
        chances = [
            self._hinted.get(b, self._again if b in self._varying else 1.0) for b in self._rest
        ]
        kept = [(b, p) for b, p in zip(self._rest, chances, strict=True) if p >= 0.5]
        return [b for b, _ in kept], np.array([p for _, p in kept], np.float32)
