"""What a device written in Python has done so far: its totals, and its latest events.

Its owner's lock is held. Of what an accelerator's streams do, times are known once it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dynoffload.memory.device import Cause, Counters, Event, EventKind

Span = Callable[[], tuple[float, float] | None]
"""Returns begin and end on `time.perf_counter`'s clock; None until it is over."""
_EVENTS = 65536  # kept between two calls of `Device.events`; those beyond are counted
_TOTALS = (
    *("bytes_in", "bytes_out", "prefetched_bytes", "used_bytes", "wasted_bytes"),
    *("faults", "stalls", "stall_s", "events_lost"),
)


class Tally:
    """Totals and events of one device."""

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = 0
        self.prefetched_bytes = self.used_bytes = self.wasted_bytes = 0
        self.faults = self.stalls = self.events_lost = 0
        self.stall_s = 0.0
        self._events: list[Event] = []
        self._pending: list[tuple[Span, EventKind, Cause, int, int]] = []

    def begun(self, span: Span, kind: EventKind, cause: Cause, region: int, nbytes: int) -> None:
        """A copy, or a wait of the compute stream, was given to a stream."""
        self._pending.append((span, kind, cause, region, nbytes))

    def _drain(self) -> None:
        pending, self._pending = self._pending, []
        for one in pending:
            span, kind, cause, region, nbytes = one
            if (found := span()) is None:
                self._pending.append(one)
                continue
            self.note(kind, cause, region, found[0], nbytes, found[1])
            if kind is EventKind.STALL:
                self.stall_s += found[1] - found[0]

    def note(
        self,
        kind: EventKind,
        cause: Cause,
        region: int,
        start: float,
        nbytes: int,
        end: float | None = None,
    ) -> None:
        """Keep an event; it ends now, if ``end`` is not said."""
        if len(self._events) == _EVENTS:
            self.events_lost += 1
            return
        end = time.perf_counter() if end is None else end
        self._events.append(Event(start, end, nbytes, region, kind, cause))

    def take_events(self) -> list[Event]:
        """Return and forget the events."""
        self._drain()
        events, self._events = self._events, []
        return events

    def counters(self, resident_bytes: int, peak_bytes: int) -> Counters:
        """Return the totals."""
        self._drain()
        totals = {name: getattr(self, name) for name in _TOTALS}
        return Counters(**totals, resident_bytes=resident_bytes, peak_bytes=peak_bytes)
