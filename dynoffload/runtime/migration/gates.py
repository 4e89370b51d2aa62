"""Decides when prefetching pays: for a source of predictions, and for each block of an order.

If a source's steps stall long, or waste much of what they prefetch, a few steps run on demand. The
mode that stalls less is used from then on. Blocks unlikely to run are left out of an order. A used
prefetch saves the stall for its bytes; a wasted one costs `WASTED` times as much. So a block with
probability p is worth prefetching if p > `WASTED` (1 - p).
"""

from __future__ import annotations

import logging
import math
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
"""Stalled seconds per second of work above which a trial starts, ..."""
WINS = 0.8
"""... unless they are less than this share of those of steps on demand."""
WASTE = 0.5
"""Share of prefetched bytes wasted above which a trial starts."""
WASTED = 3.0
"""Cost of a wasted byte, in bytes prefetched in time."""
LEAST = WASTED / (1 + WASTED)
"""Least probability of a block that is prefetched."""


AVERAGE = 0.1
"""Weight of the newest step in running accuracies."""
SETTLED = 96
"""Predicted steps after which a pilot that is no better falls silent; ..."""
STEADY = 8
"""... or steps in a row that all ran the same blocks."""
DRIFT = 0.1
"""Drop of the last order's accuracy that has a silent pilot asked again; any, after equal steps."""
_NOISE = 1.0  # standard errors of the gain that count as nothing


class Standing:
    """Running means of the accuracy of the pilot and of the last order, on the same steps.

    Attributes:
        pilot: accuracy of the pilot's predictions before the step.
        last_order: accuracy of repeating the last order.
        steps: number of steps averaged.
    """

    def __init__(self) -> None:
        self.pilot = self.last_order = math.nan
        self.steps = 0

    def observe(self, pilot: float, last_order: float) -> None:
        """Enter the accuracies of a step."""
        weight = max(AVERAGE, 1 / (self.steps + 1))
        self.pilot = pilot if not self.steps else self.pilot + weight * (pilot - self.pilot)
        change = weight * (last_order - self.last_order) if self.steps else 0.0
        self.last_order = self.last_order + change if self.steps else last_order
        self.steps += 1


class Silence:
    """Decides when prediction beyond the last order is worth nothing.

    Attributes:
        holds: whether the pilot is not asked.
    """

    def __init__(self) -> None:
        self.holds = False
        self._said = False
        self._reset()

    def _reset(self) -> None:
        self.holds = False
        self._gains: list[float] = []
        self._steady = 0  # steps in a row in which the last order was right
        self._usual = math.nan  # running accuracy of the last order
        self._least = 0.0  # of that, for the pilot to stay silent

    def observe(self, gain: float | None, last_order: float) -> bool:
        """Enter a step; return whether the pilot falls silent now for the first time.

        Args:
            gain: by how much the pilot was more accurate than the last order; None if not asked.
            last_order: accuracy of the last order.
        """
        known = not math.isnan(self._usual)
        self._usual += AVERAGE * (last_order - self._usual) if known else 0.0
        if not known:
            self._usual = last_order
        self._steady = self._steady + 1 if last_order == 1 else 0
        if self.holds:
            if self._usual < self._least:
                self._reset()
            return False
        if gain is not None:
            self._gains.append(gain)
        gains = np.array(self._gains)
        if self._steady >= STEADY:
            self.holds, self._usual, self._least = True, 1.0, 1.0  # until a step differs
        elif len(gains) >= SETTLED:
            self.holds = bool(gains.mean() <= _NOISE * gains.std() / math.sqrt(len(gains)))
            self._least = self._usual - DRIFT
            self._gains.clear()
        first = self.holds and not self._said
        self._said |= self.holds
        return first


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

    def observe(self, step: StepStats, on_demand: float = math.nan) -> float:
        """Evaluate ``step``, which ran with or without prefetch according to `prefetch`.

        Args:
            step: the step.
            on_demand: stalled seconds per second of work of steps on demand; NaN if unknown.

        Returns:
            ``on_demand``, measured again if a trial ends.
        """
        if self.lost:
            return on_demand
        if self._skip:
            self._skip -= 1
            return on_demand
        self._steps.append(step)
        if self.prefetch and len(self._steps) == self._watched:
            stalled = stall_ratio(self._steps)
            doubtful = stalled > WAITING and not stalled < WINS * on_demand
            if doubtful or _waste(self._steps) > WASTE:
                self._change(prefetch=False)
            else:
                self._steps.clear()
        elif not self.prefetch and len(self._steps) == TRIED:
            with_prefetch, without = stall_ratio(self._prefetched), stall_ratio(self._steps)
            on_demand = without
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
        return on_demand

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


def stall_ratio(steps: Sequence[StepStats]) -> float:
    """Return the stalled seconds per second of work."""
    waited = sum(step.stall_s for step in steps)
    return waited / max(sum(step.seconds for step in steps) - waited, 1e-9)


def _waste(steps: Sequence[StepStats]) -> float:
    """Return the share of prefetched bytes that were wasted."""
    return sum(s.wasted_bytes for s in steps) / max(1, sum(s.prefetched_bytes for s in steps))
