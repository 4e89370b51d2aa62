"""Counts what an accelerator's streams did, once they are past it."""

from __future__ import annotations

from dynoffload.memory.accelerator.streams import TimedEvent
from dynoffload.memory.device import Cause, Counters, Event, EventKind
from dynoffload.memory.tally import Tally


class StreamTally(Tally):
    """A tally of copies and stalls whose times are known only when they are over."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: list[tuple[TimedEvent, EventKind, Cause, int, int]] = []

    def begun(
        self, event: TimedEvent, kind: EventKind, cause: Cause, region: int, nbytes: int
    ) -> None:
        """A copy, or a wait of the compute stream, was given to a stream; ``event`` is its end."""
        self._pending.append((event, kind, cause, region, nbytes))

    def take_events(self) -> list[Event]:
        """See `Tally.take_events`."""
        self._drain()
        return super().take_events()

    def counters(self, resident_bytes: int, peak_bytes: int) -> Counters:
        """See `Tally.counters`."""
        self._drain()
        return super().counters(resident_bytes, peak_bytes)

    def _drain(self) -> None:
        pending, self._pending = self._pending, []
        for one in pending:
            event, kind, cause, region, nbytes = one
            span = event.span()
            if span is None:
                self._pending.append(one)
                continue
            self.note(kind, cause, region, span[0], nbytes, span[1])
            if kind is EventKind.STALL:
                self.stall_s += span[1] - span[0]
