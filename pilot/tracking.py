"""Tracking a step: what has run so far, and the rest predicted anew.

`StepTracker` observes each block as it runs, lays it over the template, passes what is thus known
to the `Posterior` of the optional blocks, and answers with the order to expect from here on. Only
forward is followed: backward replays what forward ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from dynoffload.pilot.correction import Posterior
from dynoffload.pilot.features import Floats
from dynoffload.pilot.loops import LoopModel
from dynoffload.pilot.models import Rest
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
        self._layout = pilot.layout
        self._start = np.zeros(0, dtype=np.float32)
        self._posterior: Posterior | None = None
        self._rest: Rest | None = None
        self._stops: tuple[int, ...] = ()
        self._told = 0  # bundles that the model was told of
        if pilot.model is not None:
            self._start = pilot.model.probabilities(sample)
            if pilot.correction is not None:
                self._posterior = pilot.correction.start(self._start)
                self._rest = pilot.model.rest(sample)
                self._stops = pilot.correction.stops
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
        family = self._layout.family_of.get(block, -1)
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
        place = self._layout.place_of.get(slot, -1)
        if place > self._slot:
            self._slot = place
            self._resolve(place)
        if place == self._slot and place in self._layout.loops:
            self._under_way = self._pilot.loops[self._layout.loops.index(place)]
            self._expected = self._under_way.predict(self._sample)
            self._go_on(block)

    def hint(self, blocks: Sequence[int], values: Sequence[float]) -> None:
        """The network hints how likely some of the blocks to come are, 0 to 1."""
        if self._posterior is None:
            return
        places: list[int] = []
        chances: list[float] = []
        for block, value in zip(blocks, values, strict=True):
            place = self._layout.place_of.get((block, self._seen[block]), -1)
            number = self._layout.optional_number.get(place, -1)
            bundle = int(self._layout.bundles[number]) if number >= 0 else -1
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
        posterior = self._posterior
        if posterior is not None and self._rest is not None:
            begun = max((stop for stop in self._stops if stop <= len(self._ran)), default=0)
            if begun > self._told:  # another site is over, and the model may have learned of it
                self._told = begun
                posterior.replace(self._rest(self._ran[:begun]))
        order: list[int] = []
        fidelity = 1.0
        if self._under_way is not None:
            fidelity = self._under_way.fidelity
            order = self._under_way.rest(self._sample, self._loop)
            self._expected = [*self._loop, *order]
        rest, confidence = self._pilot.decode(
            self._sample, self.chances, self._pilot.threshold, start=self._slot + 1
        )
        if order:
            here = np.full(len(order), fidelity, dtype=np.float32)
            confidence = np.concatenate((here, confidence))
        return order + rest, confidence

    @property
    def chances(self) -> Floats:
        """P(runs) of each optional slot, from what is known."""
        chances = self._start if self._posterior is None else self._posterior.chances
        slots = chances[self._layout.bundles]
        if self._adjust is None:
            return slots
        adjusted = self._adjust(slots)
        if self._posterior is None:
            return adjusted
        # What ran of late tells of the model, not of what the network says of this very step.
        return np.where(self._posterior.hinted[self._layout.bundles], slots, adjusted)

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
        layout = self._layout
        passed = int(np.searchsorted(layout.optional, place, side="right"))
        for number in range(self._passed, passed):
            if layout.bundles[number] < len(self._ran):
                continue  # decided with the first of its bundle
            ran = int(layout.optional[number]) == place
            if self._posterior is not None:
                self._posterior.observe(ran)
            self._ran.append(ran)
            self.decided = True
        self._passed = max(self._passed, passed)
