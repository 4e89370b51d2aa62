"""An exchange between processes of one machine that is as slow as one wants.

Every exchange takes the time of its bytes on a link of its own rate. There is no latency, and what
joins the links is no bottleneck.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from dynoffload.moe.parallel.exchange import Exchange, Pending


class SlowExchange(Exchange):
    """An exchange whose bytes to other ranks take a link's time, one after the other.

    Attributes:
        rate: bytes a second.
        waited_s: seconds that this rank has waited for others so far.
    """

    rate = float("inf")
    waited_s = 0.0
    _free = 0.0

    def start(
        self,
        into: torch.Tensor,
        given: torch.Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        what: str,
    ) -> Pending:
        """See `Exchange.start`."""
        row = given[0].numel() * given.element_size() if len(given) else 0
        others = sum(rows for rank, rows in enumerate(gives) if rank != self.rank)
        pending = super().start(into, given, takes, gives, what)
        self._free = max(self._free, time.monotonic()) + others * row / self.rate
        return Pending(_Due(pending, self._free, self), self.timeout, what, ())


class _Due:
    """Stands for an exchange that has arrived once it is due."""

    def __init__(self, pending: Pending, due: float, exchange: SlowExchange) -> None:
        self._pending, self._due, self._exchange = pending, due, exchange

    def wait(self, *_: Any) -> None:
        start = time.monotonic()
        self._pending.wait()
        time.sleep(max(self._due - time.monotonic(), 0.0))
        self._exchange.waited_s += time.monotonic() - start
