"""Limits how far the host runs ahead of the accelerator, in uses of the plan; see [Note: ahead] in
`accelerator`."""

from __future__ import annotations

from collections import deque

from dynoffload.memory.accelerator.streams import StreamEvent, Streams

UNKNOWN = -1
"""The number of a use that nobody knows: work may still be given."""

_LIMIT = 4  # uses


class RunAhead:
    """An event after each of the last uses.

    Args:
        streams: of the accelerator.

    Attributes:
        use: the number of the use that is under way.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._events: deque[tuple[int, StreamEvent]] = deque()
        self.use = 0

    def next(self) -> StreamEvent | None:
        """A use begins, and all work of those before was given; return what to wait for, so that
        the host is not too far ahead."""
        self.use += 1
        self._events.append((self.use, self._streams.now()))
        return self._events.popleft()[1] if len(self._events) > _LIMIT else None

    def after(self, use: int) -> StreamEvent:
        """Return an event after all work of ``use``."""
        if use != UNKNOWN:
            for number, event in self._events:
                if number > use:
                    return event
        return self._streams.now()
