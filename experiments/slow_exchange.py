"""An exchange between processes of one machine with an adjustable rate.

Every exchange takes as long as its bytes on the rank's own link. There is no latency, and the
network between the links is not a bottleneck.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from dynoffload.moe.parallel.exchange import Exchange, Pending


class SlowExchange(Exchange):
    """An exchange that sends its bytes to other ranks at a link's rate, sequentially.

    Attributes:
        rate: bytes per second.
        waited_s: seconds that this rank has waited for exchanges so far.
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
    """A pending exchange that completes no earlier than its due time."""

    def __init__(self, pending: Pending, due: float, exchange: SlowExchange) -> None:
        self._pending, self._due, self._exchange = pending, due, exchange

    def wait(self, *_: Any) -> None:
        start = time.monotonic()
        self._pending.wait()
        time.sleep(max(self._due - time.monotonic(), 0.0))
        self._exchange.waited_s += time.monotonic() - start
