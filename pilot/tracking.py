"""Tracks a running step and updates the prediction of its remaining blocks.

`StepTracker` observes each block as it runs, matches it to the template, and returns the expected
rest of the order. Hints are mixed with the pilot's log-odds. Of slots of which each runs only if
the one before it does, what is known of one decides about the others. It follows forward only, as
backward replays forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.features import Floats, sigmoid
from dynoffload.pilot.loops import LoopModel
from dynoffload.pilot.structure import Structure
from dynoffload.pilot.template import LOOP, Slot
from dynoffload.profiler.input_features import InputFeatures

AT_HAND = 1
"""Which hints of `StepTracker` are about the next decision; 0 are ahead of earlier ones."""
_LIMIT = 0.02  # of a hint's chance, from below and above


class StepTracker:
    """Tracks one step.

    Args:
        structure: of the network's orders.
        sample: the sample of the step.
        odds: log-odds that each slot of one block runs, ``[single]``.
        chain: the number of each slot's chain, ``[single]`` (`Evidence.nested`).
        trust: weights of hints given ahead and at hand, ``[2, 4]``.
        steady: whether each slot ran in every step so far, so that nothing decides about it,
            ``[single]``.

    Attributes:
        decided: whether the prediction may have changed since the last `expect`: a slot did not
            run as expected, a hint came, or a loop deviated from its prediction.
        hinted: whether there was a hint about each slot, ahead and at hand, ``[2, single]``.
        mixed: what the latest hint of each is mixed from: a constant, the pilot's log-odds, the
            hint's, and their sign, ``[2, single, 4]``.
    """

    def __init__(
        self,
        structure: Structure,
        sample: InputFeatures,
        odds: Floats,
        chain: npt.NDArray[np.int64],
        trust: Floats,
        steady: npt.NDArray[np.bool_],
    ) -> None:
        self.decided = False
        self.hinted = np.zeros((2, len(odds)), np.bool_)
        self.mixed = np.ones((2, len(odds), 4), np.float32)
        self.mixed[:, :, 1] = odds
        self._structure, self._sample, self._chain, self._trust = structure, sample, chain, trust
        self._template = structure.template
        self._chained = np.bincount(chain, minlength=1)[chain] > 1  # slots in chains
        self._steady = steady
        self._chances = sigmoid(odds)
        self._passed = 0  # slots of one block that are decided
        self._seen: Counter[int] = Counter()  # occurrences by block and by family code
        self._slot = -1  # the last slot, in canonical order, that ran
        self._family = -1  # family of the last block
        self._loop_model: LoopModel | None = None  # model of the current loop
        self._loop: list[int] = []  # blocks of the current loop so far
        self._expected: list[int] = []  # its predicted blocks

    def observe(self, blocks: Sequence[int]) -> None:
        """Record that blocks ran, in order; negative: a block unknown to the vocabulary."""
        places: list[int] = []
        for block in blocks:
            family = self._template.family_of.get(block, -1)
            if family >= 0 and family == self._family:
                if self._loop_model is not None:
                    self._continue_loop(block)
                continue
            self._leave_loop()
            self._family = family
            if block < 0:
                continue
            code = LOOP - family if family >= 0 else block
            slot: Slot = (code, self._seen[code])
            self._seen[code] += 1
            place = self._template.place_of.get(slot, -1)
            if place > self._slot:
                self._slot = place
                places.append(place)
            if place == self._slot and place in self._template.loops:
                self._loop_model = self._structure.loops[self._template.loops.index(place)]
                self._expected = self._loop_model.predict(self._sample)
                self._continue_loop(block)
        if places:
            self._resolve(places)

    def hint(self, blocks: Sequence[int], values: Sequence[float]) -> None:
        """Record a routing hint: probabilities, 0 to 1, of some coming blocks."""
        find, seen = self._template.number_of.get, self._seen
        known = [(find((b, seen[b]), -1), v) for b, v in zip(blocks, values, strict=True)]
        coming = [(number, value) for number, value in known if number >= self._passed]
        if not coming:
            return
        slots = np.array([number for number, _ in coming])
        kind = AT_HAND if self._is_next(int(slots.min())) else 0
        chance = np.clip(np.array([value for _, value in coming]), _LIMIT, 1 - _LIMIT)
        odds = np.log(chance) - np.log1p(-chance)
        mixed = self.mixed[kind]
        mixed[slots, 2], mixed[slots, 3] = odds, np.sign(odds)
        self._chances[slots] = sigmoid(mixed[slots] @ self._trust[kind])
        self.hinted[kind, slots] = True
        self.decided = True

    def at_hand(self, blocks: Sequence[int]) -> bool:
        """Return whether a hint about ``blocks`` is about the next decision."""
        find, seen = self._template.number_of.get, self._seen
        numbers = [find((block, seen[block]), -1) for block in blocks]
        coming = [number for number in numbers if number >= self._passed]
        return bool(coming) and self._is_next(min(coming))

    def _is_next(self, slot: int) -> bool:
        """Return whether no other decision is expected to run a block before that at ``slot``."""
        here = slice(self._passed, slot)
        between = (self._chances[here] >= 0.5) & ~self._steady[here]
        return not (between & (self._chain[here] != self._chain[slot])).any()

    def expect(self) -> tuple[list[int], Floats]:
        """Return the expected remaining blocks and the probability of each, ``[blocks]``."""
        self.decided = False
        order: list[int] = []
        fidelity = 1.0
        if self._loop_model is not None:
            fidelity = self._loop_model.fidelity
            order = self._loop_model.predict(self._sample)[len(self._loop) :]
            self._expected = [*self._loop, *order]
        rest, confidence = self._structure.decode(self._sample, self._chances, start=self._slot + 1)
        here = np.full(len(order), fidelity, dtype=np.float32)
        return order + rest, np.concatenate((here, confidence))

    @property
    def chances(self) -> Floats:
        """P(runs) of each slot of one block, given the step so far; 0 or 1 of decided ones."""
        return self._chances

    def _leave_loop(self) -> None:
        """Leave the current loop: a block outside it ran."""
        self.decided |= len(self._expected) > len(self._loop)
        self._loop_model, self._loop, self._expected = None, [], []

    def _continue_loop(self, block: int) -> None:
        """Record another block of the current loop."""
        place = len(self._loop)
        self._loop.append(block)
        self.decided |= self._expected[place : place + 1] != [block]

    def _resolve(self, places: Sequence[int]) -> None:
        """Decide the slots up to the last of ``places``: of these only those at ``places`` ran."""
        single = self._template.single
        begin, end = self._passed, int(np.searchsorted(single, places[-1], side="right"))
        if begin >= end:
            return
        self._passed = end
        ran = np.zeros(end - begin, np.bool_)
        at = np.searchsorted(single, places)
        ran[at[single[np.minimum(at, len(single) - 1)] == places] - begin] = True
        self.decided |= bool(((self._chances[begin:end] >= 0.5) != ran).any())
        for number in (np.flatnonzero(self._chained[begin:end]) + begin).tolist():
            self._follow_chain(number, bool(ran[number - begin]), float(self._chances[number]))
        self._chances[begin:end] = ran

    def _follow_chain(self, number: int, ran: bool, chance: float) -> None:
        """Correct the later slots of a chain, of which one ran with ``chance``, or did not."""
        later = np.flatnonzero(self._chain[number + 1 :] == self._chain[number]) + number + 1
        later = later[~self.hinted[AT_HAND, later]]
        known = self._chances[later]
        self._chances[later] = np.minimum(known / max(chance, _LIMIT), 1) if ran else 0
