"""Tracks one forward and updates the prediction of its remaining blocks.

`Step` passes each block that begins, and each hint, to a tracker of `dynoffload.pilot.tracking`.
It predicts the rest again after an unexpected block or a decisive hint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dynoffload.pilot.features import BlockHint
from dynoffload.pilot.tracking import StepTracker
from dynoffload.runtime.migration.gates import likely


class Step:
    """One forward pass: ``expected`` is its predicted order, ``chosen`` the blocks to prefetch.

    Attributes:
        foreseen: number of blocks that ran as predicted right before them.
        lapsed: whether there was no time to ask a router, or to predict the rest anew.
    """

    def __init__(
        self,
        following: StepTracker | None,
        expected: Sequence[int],
        chosen: Sequence[int] = (),
    ) -> None:
        self.foreseen = 0
        self.lapsed = False
        self._following = following
        self._expected, self._at = list(expected), 0
        self._chosen, self._planned = list(chosen), 0  # the latter: blocks begun at that time
        self._diverged = False
        self._begun: list[int] = []  # blocks that the tracker is yet to observe

    @property
    def follows(self) -> bool:
        """Whether a tracker observes what runs."""
        return self._following is not None

    def ran(self, blocks: Sequence[int]) -> None:
        """Record that ``blocks`` run now: one module, or all experts of a call."""
        if self._following is None:
            return
        self._begun += blocks
        rest = self._expected[self._at : self._at + len(blocks)]
        if rest == list(blocks):
            self._at += len(blocks)
            self.foreseen += len(blocks)
            return
        self._diverged = True
        if len(blocks) > 1:
            run = set(blocks)
            passed: set[int] = set()
            for place, block in enumerate(self._expected[self._at :], self._at + 1):
                if block in passed:
                    break  # another pass over them
                passed.add(block)
                if block in run:
                    self.foreseen += 1
                    self._at = place

    def hinted(self, hint: BlockHint) -> None:
        """Record a routing hint of the network."""
        if self._following is not None:
            self._catch_up(self._following)
            self._following.hint(hint.blocks, hint.values)
            self._diverged |= self._following.decided

    def _catch_up(self, following: StepTracker) -> None:
        following.observe(self._begun)
        self._begun.clear()

    @property
    def diverged(self) -> bool:
        """Whether the rest may have to be predicted anew."""
        return self._following is not None and self._diverged

    def choose(self, ran: Sequence[int]) -> list[int] | None:
        """Predict the rest anew; return the blocks to prefetch after those that ``ran``, or None
        if these are as planned."""
        assert self._following is not None
        self._diverged = False
        self._catch_up(self._following)
        self._expected, chances = self._following.expect()
        self._at = 0
        chosen = likely(self._expected, chances)
        return None if chosen == _less(self._chosen, ran[self._planned :]) else chosen

    def plan(self, chosen: list[int], ran: Sequence[int]) -> None:
        """Record that blocks are planned to be prefetched after those that ``ran``."""
        self._chosen, self._planned = chosen, len(ran)


def _less(blocks: Sequence[int], begun: Sequence[int]) -> list[int]:
    """Return ``blocks`` minus the multiset ``begun``, in order."""
    gone = Counter(begun)
    left: list[int] = []
    for block in blocks:
        if gone[block]:
            gone[block] -= 1
        else:
            left.append(block)
    return left
