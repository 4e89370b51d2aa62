"""Decides when prefetching pays: for a source of predictions, and for each block of an order.

If a source's steps stall long, or waste much of what they prefetch, a few steps run on demand. The
mode that stalls less is used from then on. Blocks unlikely to run are left out of an order. A used
prefetch saves the stall for its bytes; a wasted one costs `WASTED` times as much. So a block with
probability p is worth prefetching if p > `WASTED` (1 - p).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynoffload.telemetry import StepStats

logger = logging.getLogger(__name__)

SETTLING = 2
"""Steps ignored after a change: they still move what the previous mode left resident."""
WATCHED = 8
"""Steps with prefetch before the first evaluation."""
TRIED = 3
"""Steps on demand in a trial."""
GROWTH = 4
"""Factor by which the watched steps grow after a trial that prefetch won."""
WAITING = 0.1
"""Stalled seconds per second of work above which a trial starts."""
WASTE = 0.5
"""Share of prefetched bytes wasted above which a trial starts."""
WASTED = 3.0
"""Cost of a wasted byte, in bytes prefetched in time."""
LEAST = WASTED / (1 + WASTED)
"""Least probability of a block that is prefetched."""


class Trial:
    """Decides after each step whether the next one prefetches.

    Args:
        source: name of the source of predictions, for the log.

    Attributes:
        prefetch: whether the next step should prefetch.
        lost: whether prefetch lost a trial; it stays off then.
    """

    def __init__(self, source: str) -> None:
        self.prefetch = True
        self.lost = False
        self._source = source
        self._watched = WATCHED
        self._skip = SETTLING
        self._steps: list[StepStats] = []
        self._prefetched: list[StepStats] = []

    def observe(self, step: StepStats) -> None:
        """Evaluate ``step``, which ran with or without prefetch according to `prefetch`."""
        if self.lost:
            return
        if self._skip:
            self._skip -= 1
            return
        self._steps.append(step)
        if self.prefetch and len(self._steps) == self._watched:
            if _stall_ratio(self._steps) > WAITING or _waste(self._steps) > WASTE:
                self._change(prefetch=False)
            else:
                self._steps.clear()
        elif not self.prefetch and len(self._steps) == TRIED:
            with_prefetch, without = _stall_ratio(self._prefetched), _stall_ratio(self._steps)
            if without <= with_prefetch:
                self.lost = True
                logger.warning(
                    "prefetch by %s stalled %.3f s per second of work and wasted %.0f%% of its "
                    "bytes; on demand stalls %.3f s: prefetch is off from now (results are "
                    "unaffected)",
                    self._source,
                    with_prefetch,
                    100 * _waste(self._prefetched),
                    without,
                )
            else:
                self._watched *= GROWTH
                self._change(prefetch=True)

    def _change(self, *, prefetch: bool) -> None:
        self.prefetch, self._skip = prefetch, SETTLING
        self._prefetched, self._steps = self._steps, []


def likely(blocks: Sequence[int], confidence: npt.NDArray[np.float32] | None) -> list[int]:
    """Return the blocks of a predicted order that are worth prefetching.

    Args:
        blocks: the order.
        confidence: probability that each block runs, ``[blocks]``; None if unknown.
    """
    if confidence is None:
        return list(blocks)
    return [b for b, p in zip(blocks, confidence.tolist(), strict=True) if p >= LEAST]


def _stall_ratio(steps: Sequence[StepStats]) -> float:
    """Return the stalled seconds per second of work."""
    waited = sum(step.stall_s for step in steps)
    return waited / max(sum(step.seconds for step in steps) - waited, 1e-9)


def _waste(steps: Sequence[StepStats]) -> float:
    """Return the share of prefetched bytes that were wasted."""
    return sum(s.wasted_bytes for s in steps) / max(1, sum(s.prefetched_bytes for s in steps))
