"""Strict replay: the last sample's order is followed to the letter, or not at all.

What it is: the rule by which ZeRO-Infinity's prefetcher trusts its trace (Rajbhandari et al., SC
2021; ``PartitionedParameterCoordinator`` in DeepSpeed). A sample is recorded, visit by visit, in
forward and in backward, and the samples after it are prefetched by that. The first visit that is
not the one recorded ends the prefetch of its sample; the sample after it runs on demand, while it
is recorded anew. A sample that only ends early leaves the record as it is. What it is not:
``policy="repeat"``, which prefetches every sample by the one before it, finds its place again after
a visit out of order, plans backward by what really ran, and goes off where it loses. Nor does this
judge itself: it is the baseline, with what it costs.

How it fits: the forecast asks `begin` whether a sample is prefetched, the migrator tells `visit`.
"""

from __future__ import annotations

import logging
from enum import Enum

logger = logging.getLogger(__name__)


class Trust(Enum):
    """What a sample does with the record."""

    RECORDING = "recording"  # there is none: it is made, and everything is on demand
    FOLLOWING = "following"  # every visit so far was the recorded one
    BROKEN = "broken"  # one was not: the record is gone, and the next sample makes another


class Replay:
    """The record of one session's last sample.

    Attributes:
        trust: what the sample does that runs now.
        breaks: samples that came out of order so far.
    """

    def __init__(self) -> None:
        self.trust = Trust.RECORDING
        self.breaks = 0
        self._record: list[int] = []
        self._place = 0  # in the record, of the visit that comes next

    def begin(self) -> bool:
        """A sample begins; return whether it is to be prefetched by the record."""
        if self.trust is Trust.BROKEN:
            self.forget()
        elif self._record:
            self.trust = Trust.FOLLOWING
        self._place = 0
        return self.trust is Trust.FOLLOWING

    def visit(self, key: int, name: str) -> bool:
        """A visit begins; return whether this is the first of its sample out of order.

        Args:
            key: tells units and their two phases apart.
            name: of what is visited, for the log.
        """
        if self.trust is Trust.RECORDING:
            self._record.append(key)
        elif self.trust is Trust.FOLLOWING:
            if self._place < len(self._record) and self._record[self._place] == key:
                self._place += 1
                return False
            self.trust = Trust.BROKEN
            self.breaks += 1
            level = logging.INFO if self.breaks == 1 else logging.DEBUG
            logger.log(
                level,
                "replay: visit %d is of %s, and the recorded one is not: this step goes on without "
                "prefetch, the next is recorded anew%s",
                self._place,
                name,
                "; from now on this is said at DEBUG" if self.breaks == 1 else "",
            )
            return True
        return False

    def forget(self) -> None:
        """There is no record: the next sample is recorded."""
        self.trust = Trust.RECORDING
        self._record, self._place = [], 0
