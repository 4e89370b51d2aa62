"""Transfers under way on a link: when the next one ends, and which have ended.

Bytes flow at the link's rates, shared evenly among the transfers of one direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dynoffload.simulation.machine import Link

_BYTE = 1e-3  # less than this is left of what has ended, by the rounding of times
_MOMENT = 1e-12  # seconds


@dataclass(slots=True)
class Transfer:
    """One region on its way.

    Attributes:
        region: which.
        nbytes: of it.
        reading: into fast memory.
        delay: seconds before the first byte.
        planned: nobody waited for it when it began.
        left: bytes still to come.
    """

    region: int
    nbytes: int
    reading: bool
    delay: float
    planned: bool
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.nbytes


class Traffic:
    """The transfers of one link.

    Args:
        link: whose rates they share.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.under_way: list[Transfer] = []

    def begin(self, transfer: Transfer) -> None:
        """It is under way from now on."""
        self.under_way.append(transfer)

    def soonest(self) -> float:
        """Return the seconds until something happens: inf if nothing is under way."""
        delays = [one.delay for one in self.under_way if one.delay > 0]
        ends = (one.left / rate for ones, rate in self._flows() for one in ones)
        return min(min(delays, default=math.inf), min(ends, default=math.inf))

    def pass_time(self, seconds: float) -> list[Transfer]:
        """Let time pass, no longer than `soonest`; return what has ended."""
        flows = self._flows()
        for one in self.under_way:
            if one.delay > 0:
                one.delay = one.delay - seconds if one.delay - seconds > _MOMENT else 0.0
        for ones, rate in flows:
            for one in ones:
                one.left -= seconds * rate
        ended = [one for one in self.under_way if one.delay <= 0 and one.left <= _BYTE]
        for one in ended:
            self.under_way.remove(one)
        return ended

    def _flows(self) -> list[tuple[list[Transfer], float]]:
        """Return the transfers of each direction that flow, and the bytes per second of each."""
        flowing = [one for one in self.under_way if one.delay <= 0]
        reads = [one for one in flowing if one.reading]
        writes = [one for one in flowing if not one.reading]
        rates = self._link.rates(reads=bool(reads), writes=bool(writes))
        return [
            (ones, rate / len(ones))
            for ones, rate in zip((reads, writes), rates, strict=True)
            if ones
        ]
