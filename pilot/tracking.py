"""Tracking a step: what has run so far, and the rest predicted anew.

`StepTracker` observes each block as it runs, lays it over the template, passes what is thus known
to the `Posterior` of the optional blocks, and answers with the order to expect from here on. Only
forward is followed: backward replays what forward ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from dynoffload.pilot.features import Floats
from dynoffload.pilot.loops import LoopModel
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.template import LOOP, Slot
from dynoffload.profiler.input_features import InputFeatures


class StepTracker:
    """One step.

    Args:
        pilot: predicts.
        sample: what the step runs.
        adjust: given P(runs) of the optional slots, returns it as it is of late.

    Attributes:
        decided: whether anything was learned since the rest was last asked for: an optional block
            ran or did not, or a loop went another way than was foretold.
    """

    def __init__(
        self, pilot: Pilot, sample: InputFeatures, adjust: Callable[[Floats], Floats] | None = None
    ) -> None:
        self.decided = False
        self._adjust = adjust
        self._pilot, self._sample = pilot, sample
        self._template, self._bundles = pilot.template, pilot.bundle_of
        self._posterior = pilot.start(sample)  # None where the network has no optional blocks
        self._ran: list[bool] = []  # of the first bundles of optional slots
        self._passed = 0  # optional slots
        self._seen: Counter[int] = Counter()  # by block, and by family's code
        self._slot = -1  # the last slot, in canonical order, that anything ran in
        self._family = -1  # that the last block was of
        self._under_way: LoopModel | None = None
        self._loop: list[int] = []  # blocks of the loop under way
        self._expected: list[int] = []  # as they were foretold

    def observe(self, block: int) -> None:
        """A block ran; negative: one that the vocabulary does not know."""
        family = self._template.family_of.get(block, -1)
        if family >= 0 and family == self._family:
            if self._under_way is not None:
                self._go_on(block)
            return
        self._leave()
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
            self._under_way = self._pilot.loops[self._template.loops.index(place)]
            self._expected = self._under_way.predict(self._sample)
            self._go_on(block)

    def hint(self, blocks: Sequence[int], values: Sequence[float]) -> None:
        """The network hints how likely some of the blocks to come are, 0 to 1."""
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
            told = np.array(chances, dtype=np.float32)
            self._posterior.hint(np.array(places), told, at_hand=at_hand)
            self.decided = True

    def remaining(self) -> list[int]:
        """Return the blocks to expect from here on, in order."""
        return self.expect()[0]

    def expect(self) -> tuple[list[int], Floats]:
        """Return the blocks to expect from here on, and the chance of each, ``[blocks]``."""
        self.decided = False
        order: list[int] = []
        fidelity = 1.0
        if self._under_way is not None:
            fidelity = self._under_way.fidelity
            order = self._under_way.predict(self._sample)[len(self._loop) :]
            self._expected = [*self._loop, *order]
        rest, confidence = self._pilot.decode(
            self._sample, self.chances, self._pilot.threshold, start=self._slot + 1
        )
        here = np.full(len(order), fidelity, dtype=np.float32)
        return order + rest, np.concatenate((here, confidence))

    @property
    def chances(self) -> Floats:
        """P(runs) of each optional slot, from what is known."""
        if self._posterior is None:
            return np.zeros(0, dtype=np.float32)
        slots = self._posterior.chances[self._bundles]
        if self._adjust is None:
            return slots
        # What ran of late tells of the model, not of what the network says of this very step.
        return np.where(self._posterior.hinted[self._bundles], slots, self._adjust(slots))

    def _leave(self) -> None:
        """Another block, that is not of the loop under way."""
        self.decided |= len(self._expected) > len(self._loop)
        self._under_way, self._loop, self._expected = None, [], []

    def _go_on(self, block: int) -> None:
        """Another block of the loop under way."""
        place = len(self._loop)
        self._loop.append(block)
        self.decided |= self._expected[place : place + 1] != [block]

    def _resolve(self, place: int) -> None:
        """What is optional up to ``place`` is known now: it ran there, and not before it."""
        optional = self._template.optional
        passed = int(np.searchsorted(optional, place, side="right"))
        for number in range(self._passed, passed):
            if self._bundles[number] < len(self._ran):
                continue  # decided with the first of its bundle
            ran = int(optional[number]) == place
            if self._posterior is not None:
                self._posterior.observe(ran)
            self._ran.append(ran)
            self.decided = True
        self._passed = max(self._passed, passed)
