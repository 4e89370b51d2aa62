"""One forward under a pilot: it observes what runs, and predicts the rest anew.

`Step` hands each block that begins, and each hint, to a `dynoffload.pilot.tracking.StepTracker`.
The rest is predicted anew when something ran that was not expected next, and when the network
hints: as long as that took no more than `SHARE` of the forward so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter

from dynoffload.pilot.features import BlockHint
from dynoffload.pilot.tracking import StepTracker
from dynoffload.runtime.migration.gates import likely

SHARE = 0.2
"""Of a forward's time so far, the share that predicting its rest anew may have taken."""


class Step:
    """One forward pass, ``expected`` in this order, of which ``chosen`` is fetched ahead.

    Attributes:
        hints: what the network hinted, for pilots to learn from.
        foreseen: how many blocks were expected as the one before them ran.
    """

    def __init__(
        self, following: StepTracker | None, expected: Sequence[int], chosen: Sequence[int] = ()
    ) -> None:
        self.hints: list[BlockHint] = []
        self.foreseen = 0
        self._following = following
        self._expected, self._at = list(expected), 0
        self._chosen, self._planned = list(chosen), 0  # the blocks that had begun as it was chosen
        self._departed = False
        self._begun = perf_counter()
        self._spent = 0.0

    @property
    def follows(self) -> bool:
        """Whether a pilot observes what runs."""
        return self._following is not None

    def ran(self, block: int) -> None:
        """A block began."""
        if self._following is None:
            return
        self._following.observe(block)
        if self._expected[self._at : self._at + 1] == [block]:
            self._at += 1
            self.foreseen += 1
        else:
            self._departed = True

    def hinted(self, hint: BlockHint) -> None:
        """The network hinted."""
        self.hints.append(hint)
        if self._following is not None:
            self._following.hint(hint.blocks, hint.values)
            self._departed |= self._following.decided

    def choose(self, ran: Sequence[int]) -> list[int] | None:
        """Return what to fetch ahead after the blocks that ``ran``, if that may have changed, is
        other than before, and asking has not taken its share of the time."""
        begun = perf_counter()
        if self._following is None or not self._departed:
            return None
        if self._spent > SHARE * (begun - self._begun):
            return None
        self._departed = False
        self._expected, chances = self._following.expect()
        self._at = 0
        self.account(begun)
        chosen = likely(self._expected, chances)
        if chosen == _less(self._chosen, ran[self._planned :]):
            return None
        self._chosen, self._planned = chosen, len(ran)
        return chosen

    def account(self, begun: float) -> None:
        """Predicting, or planning by it, has taken the time since ``begun`` (`perf_counter`)."""
        self._spent += perf_counter() - begun


def _less(blocks: Sequence[int], begun: Sequence[int]) -> list[int]:
    """Return ``blocks`` without those that have begun, each as often as it has."""
    gone = Counter(begun)
    left: list[int] = []
    for block in blocks:
        if gone[block]:
            gone[block] -= 1
        else:
            left.append(block)
    return left
