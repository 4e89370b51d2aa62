"""How far the host is ahead of the accelerator, in uses of what is followed.

What it is: a moment after each of the last uses, by which the host is held, and by which one knows
when work that was given before is over; see [Note: ahead] in `accelerator`. What it is not: the
plan.
"""

from __future__ import annotations

from collections import deque

from dynoffload.memory.accelerator.queues import Moment, Queues

UNKNOWN = -1
"""The number of a use that nobody knows: work may still be given."""

_LEAD = 4  # uses


class Lead:
    """The last uses.

    Args:
        queues: of the accelerator.

    Attributes:
        use: the number of the use that is under way.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._moments: deque[tuple[int, Moment]] = deque()
        self.use = 0

    def next(self) -> Moment | None:
        """A use begins, and all work of those before was given; return what to wait for, so that
        the host is not too far ahead."""
        self.use += 1
        self._moments.append((self.use, self._queues.now()))
        return self._moments.popleft()[1] if len(self._moments) > _LEAD else None

    def after(self, use: int) -> Moment:
        """Return a moment after all work of ``use``."""
        if use != UNKNOWN:
            for number, moment in self._moments:
                if number > use:
                    return moment
        return self._queues.now()
