"""The update that is made beside the next step: ZeRO-Offload's one-step delay (ATC 2021, 5.2).

What it is: one update that is under way, and its end, at which parameters take it over. What it is
not: who decides when; `dynoffload.optim.optimizer` does.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import NamedTuple

from dynoffload.optim.hosting import Hosting
from dynoffload.optim.work import Work, mark_uploaded, upload


class _Pending(NamedTuple):
    """An update that is being made, or was."""

    work: Work
    made: Future[None]


class Delay:
    """At most one update beside the calling thread.

    Args:
        hosting: makes it.
    """

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self._pending: _Pending | None = None

    def begin(self, work: Work) -> None:
        """Begin an update; the one before has ended."""
        for entry in work.groups:
            entry.lags.fill_(True)
        self._pending = _Pending(work, self._hosting.begin(work, lambda tile: None))

    def wait(self) -> None:
        """Hold the calling thread until it is made, well or not. Ctrl-C leaves it as it is."""
        if self._pending is not None:
            wait([self._pending.made])

    def check(self) -> None:
        """Raise what it was cut off by; it is waited for.

        Raises:
            SpillError: a file could not be read or written.
        """
        if self._pending is not None:
            self._pending.made.result()

    def end(self) -> None:
        """Let parameters take over an update that was made well. Cut off, it may be called
        again."""
        if self._pending is None:
            return
        for tile in self._pending.work.tiles:
            upload(tile, self._pending.work.arrived)
        mark_uploaded(list(self._pending.work.groups))
        self._pending = None

    def drop(self) -> None:
        """Wait for it, and forget it, however it went."""
        self.wait()
        self._pending = None
