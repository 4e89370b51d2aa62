"""When prefetching pays: for a source of predictions as a whole, and for each site of a network.

`Trial` judges "the last order" or "the pilot". When its steps wait long, or fetch much in vain, a
few run on demand, and what waits less from then on is done. A poor prediction that still saves time
is kept. `Worth` leaves out of a predicted order what is not likely enough to run.

A fetch that is used saves the wait for its bytes. One in vain moves them as well, sends out what
lay there, and that has to come back: it costs some `VAIN` times as much. So a block is worth
fetching ahead where p > `VAIN` (1 - p). Pilots calibrate their chances on steps they have not seen;
where they are wrong by now, the running sums of a site tell, whether it is on or off.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.features import site_name
from dynoffload.planning.blocks import Vocabulary
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
"""Share of prefetched bytes fetched in vain above which it is."""
VAIN = 3.0
"""What a byte fetched in vain costs, in bytes fetched in time."""
CERTAIN = 0.97
"""The chance from which a block is fetched at a site that is off."""
BETTER = 1.5
"""How many times more than that what is used must be for a site to be turned on again."""
MEMORY = 0.95
"""Weight of the steps before when another is seen."""
SHOWN = 4.0
"""Steps of a site, by their weights, before it is judged."""


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


def _waiting(steps: Sequence[StepStats]) -> float:
    """Return the seconds waited per second worked."""
    waited = sum(step.stall_s for step in steps)
    return waited / max(sum(step.seconds for step in steps) - waited, 1e-9)


def _waste(steps: Sequence[StepStats]) -> float:
    """Return the share of prefetched bytes that nobody used."""
    return sum(s.wasted_bytes for s in steps) / max(1, sum(s.prefetched_bytes for s in steps))


@dataclass
class _Site:
    """How prefetch does at one site: bytes used and in vain, steps, and whether it is on."""

    used: float = 0.0
    vain: float = 0.0
    steps: float = 0.0
    on: bool = True


class Worth:
    """Chooses what of a prediction is fetched ahead.

    Args:
        vocabulary: the blocks it is about.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._blocks = vocabulary.blocks
        self._names = [site_name(block) for block in self._blocks]
        self._sites: dict[str, _Site] = {}
        self._foretold: list[int] = []

    @property
    def off(self) -> tuple[str, ...]:
        """The sites at which only what is certain is fetched ahead."""
        return tuple(name for name, site in self._sites.items() if not site.on)

    def begin(self, blocks: Sequence[int], confidence: npt.NDArray[np.float32] | None) -> list[int]:
        """A step is foretold: return what of it to fetch ahead; see `choose`."""
        likely = _likely(blocks, confidence)
        self._foretold = [block for block, _ in likely if self._blocks[block].optional]
        return self._on(likely)

    def choose(
        self, blocks: Sequence[int], confidence: npt.NDArray[np.float32] | None
    ) -> list[int]:
        """Return what to fetch ahead of an order.

        Args:
            blocks: the order.
            confidence: the chance that each runs, ``[blocks]``; None: nobody knows.
        """
        return self._on(_likely(blocks, confidence))

    def end(self, ran: Sequence[int] | None) -> None:
        """The step ran these blocks; None: nobody knows what it would have run."""
        seen: dict[str, list[float]] = {}
        happened = set(ran or ())
        for block in () if ran is None else self._foretold:
            sums = seen.setdefault(self._names[block], [0.0, 0.0])
            sums[block not in happened] += max(self._blocks[block].nbytes, 1)
        self._foretold = []
        for name, (used, vain) in seen.items():
            site = self._sites.setdefault(name, _Site())
            site.used = MEMORY * site.used + used
            site.vain = MEMORY * site.vain + vain
            site.steps = MEMORY * site.steps + 1
            self._judge(name, site)

    def _judge(self, name: str, site: _Site) -> None:
        pays = site.used >= (VAIN if site.on else VAIN * BETTER) * site.vain
        if pays is site.on or site.steps < SHOWN:
            return
        site.on = pays
        share = site.vain / (site.used + site.vain)
        logger.warning(
            "%s: %.0f%% of the bytes predicted there were not used in the latest steps: %s",
            name,
            100 * share,
            "they are fetched ahead again"
            if pays
            else f"only what is sure to {CERTAIN:.0%} is fetched ahead from now",
        )

    def _on(self, likely: Sequence[tuple[int, float]]) -> list[int]:
        off = set(self.off)
        if not off:
            return [block for block, _ in likely]
        return [b for b, chance in likely if chance >= CERTAIN or self._names[b] not in off]


def _likely(
    blocks: Sequence[int], confidence: npt.NDArray[np.float32] | None
) -> list[tuple[int, float]]:
    """Return the blocks that are likely enough, each with its chance."""
    if confidence is None:
        return [(block, 0.0) for block in blocks]
    least = VAIN / (1 + VAIN)
    return [(b, p) for b, p in zip(blocks, confidence.tolist(), strict=True) if p >= least]
