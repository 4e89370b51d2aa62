"""What the queues of an accelerator did, told once it is over: copies, and waits for them.

What it is: copies and waits that are under way, which become events and seconds when somebody asks
and they are done. What it is not: the totals of bytes (`dynoffload.memory.tally`).
"""

from __future__ import annotations

from dynoffload.memory.accelerator.cells import Cell
from dynoffload.memory.accelerator.queues import Copied, Lag
from dynoffload.memory.device import Cause, EventKind
from dynoffload.memory.tally import Tally


class Telling:
    """Fills a tally.

    Args:
        tally: takes what is over.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._copies: list[tuple[Copied, EventKind, Cause, int, int]] = []
        self._lags: list[tuple[Lag, int, int, float]] = []

    def copied(self, moment: Copied, kind: EventKind, cause: Cause, cell: Cell) -> None:
        """A copy was queued."""
        self._copies.append((moment, kind, cause, cell.region, cell.nbytes))

    def waits(self, lag: Lag, cell: Cell, start: float) -> None:
        """The compute queue waits for a copy that is late, as far as the host knows."""
        self._tally.stalls += 1
        self._lags.append((lag, cell.region, cell.nbytes, start))

    def look(self) -> None:
        """Tell what is over by now."""
        copies, self._copies = self._copies, []
        for copy in copies:
            moment, kind, cause, region, nbytes = copy
            span = moment.span()
            if span is None:
                self._copies.append(copy)
            else:
                self._tally.note(kind, cause, region, span[0], nbytes, span[1])
        lags, self._lags = self._lags, []
        for waited in lags:
            lag, region, nbytes, start = waited
            seconds = lag.seconds()
            if seconds is None:
                self._lags.append(waited)
            else:
                self._tally.stall_s += seconds
                self._tally.note(
                    EventKind.STALL, Cause.FAULT, region, start, nbytes, start + seconds
                )
