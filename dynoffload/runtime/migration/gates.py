"""When prefetching pays: for a source of predictions as a whole, and for each block of an order.

When a source's steps stall long, or waste much of what they prefetch, a few run on demand, and what
stalls less is done from then on. Of an order, what is not likely enough to run is left out: a fetch
that is used saves the stall for its bytes; a wasted one costs some `WASTED` times as much. So a
block is worth fetching ahead where p > `WASTED` (1 - p).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynoffload.telemetry import StepStats

logger = logging.getLogger(__name__)

SETTLING = 2
"""Steps not judged after a change: they still move what the mode before left behind."""
WATCHED = 8
"""Steps with prefetch before the first judgement."""
TRIED = 3
"""Steps on demand to compare with."""
GROWTH = 4
"""How many times longer to watch after a trial that prefetch won."""
WAITING = 0.1
"""Seconds waited per second worked above which prefetch is put on trial."""
WASTE = 0.5
"""Share of prefetched bytes wasted above which it is."""
WASTED = 3.0
"""What a wasted byte costs, in bytes fetched in time."""


class Trial:
    """Decides, step by step, whether the next one prefetches.

    Args:
        source: what predicts, for the log.

    Attributes:
        prefetch: whether the next step should prefetch.
        lost: whether prefetch lost a trial, which ends the judging.
    """

    def __init__(self, source: str) -> None:
        self.prefetch = True
        self.lost = False
        self._source = source
        self._watched = WATCHED
        self._skip = SETTLING
        self._steps: list[StepStats] = []
        self._with: list[StepStats] = []

    def observe(self, step: StepStats) -> None:
        """Judge ``step``, which ran as `prefetch` said."""
        if self.lost:
            return
        if self._skip:
            self._skip -= 1
            return
        self._steps.append(step)
        if self.prefetch and len(self._steps) == self._watched:
            if _waiting(self._steps) > WAITING or _waste(self._steps) > WASTE:
                self._change(prefetch=False)
            else:
                self._steps.clear()
        elif not self.prefetch and len(self._steps) == TRIED:
            with_prefetch, without = _waiting(self._with), _waiting(self._steps)
            if without <= with_prefetch:
                self.lost = True
                logger.warning(
                    "prefetch by %s stalled %.3f s per second of work and wasted %.0f%% of its "
                    "bytes; on demand stalls %.3f s: prefetch is off from now",
                    self._source,
                    with_prefetch,
                    100 * _waste(self._with),
                    without,
                )
            else:
                self._watched *= GROWTH
                self._change(prefetch=True)

    def _change(self, *, prefetch: bool) -> None:
        self.prefetch, self._skip = prefetch, SETTLING
        self._with, self._steps = self._steps, []


def likely(blocks: Sequence[int], confidence: npt.NDArray[np.float32] | None) -> list[int]:
    """Return what of a predicted order to fetch ahead.

    Args:
        blocks: the order.
        confidence: the chance that each runs, ``[blocks]``; None: nobody knows.
    """
    if confidence is None:
        return list(blocks)
    least = WASTED / (1 + WASTED)
    return [b for b, p in zip(blocks, confidence.tolist(), strict=True) if p >= least]


def _waiting(steps: Sequence[StepStats]) -> float:
    """Return the seconds waited per second worked."""
    waited = sum(step.stall_s for step in steps)
    return waited / max(sum(step.seconds for step in steps) - waited, 1e-9)


def _waste(steps: Sequence[StepStats]) -> float:
    """Return the share of prefetched bytes that nobody used."""
    return sum(s.wasted_bytes for s in steps) / max(1, sum(s.prefetched_bytes for s in steps))
