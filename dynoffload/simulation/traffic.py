"""Transfers in progress on a simulated link.

Transfers of one direction share the link's rate evenly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dynoffload.simulation.machine import Link

_BYTE = 1e-3  # bytes; rounding may leave up to this of an ended transfer
_MOMENT = 1e-12  # seconds


@dataclass(slots=True)
class Transfer:
    """The transfer of one region.

    Attributes:
        region: index of the region.
        nbytes: its bytes.
        reading: whether it goes into fast memory.
        delay: seconds left before the first byte.
        left: bytes left to move.
    """

    region: int
    nbytes: int
    reading: bool
    delay: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.nbytes


class Traffic:
    """The transfers of one link.

    Args:
        link: the link.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.under_way: list[Transfer] = []

    def begin(self, transfer: Transfer) -> None:
        """Start a transfer."""
        self.under_way.append(transfer)

    def soonest(self) -> float:
        """Return the seconds until a delay or transfer ends, inf if none is in progress."""
        delays = [one.delay for one in self.under_way if one.delay > 0]
        ends = (one.left / rate for ones, rate in self._flows() for one in ones)
        return min(min(delays, default=math.inf), min(ends, default=math.inf))

    def pass_time(self, seconds: float) -> list[Transfer]:
        """Advance by at most `soonest` seconds; return the transfers that have ended."""
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
        """Return the transfers past their delay, by direction, and the rate of each of them."""
        flowing = [one for one in self.under_way if one.delay <= 0]
        reads = [one for one in flowing if one.reading]
        writes = [one for one in flowing if not one.reading]
        rates = self._link.rates(reads=bool(reads), writes=bool(writes))
        return [
            (ones, rate / len(ones))
            for ones, rate in zip((reads, writes), rates, strict=True)
            if ones
        ]
