"""Segments of a forward that activation checkpointing computes again during backward.

Backward goes through the segments in reverse. Each is first computed again, unit by unit; then
backward runs through it. The units that run during a backward show where segments begin.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynoffload.planning.reference import Visit
from dynoffload.profiler.experts import split_path
from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.adoption.units import Unit


class Segments:
    """The segments that the last backward computed again, for the plan of the next."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # path of a segment's first module -> of its last
        self._found: dict[str, str] = {}  # likewise, of the current backward
        self._order: Sequence[Unit] = ()  # as forward ran them, for the current backward
        # The current segment in `_order`: its first unit, the one recomputed last, and its end.
        self._first = self._at = self._stop = 0

    def __bool__(self) -> bool:
        return bool(self._known)

    def begin_backward(self, order: Sequence[Unit]) -> None:
        """End the previous backward, and begin one of forwards that ran the units in ``order``."""
        self.end_backward()
        self._order, self._found = order, {}
        self._first = self._at = self._stop = len(order)

    def end_backward(self) -> None:
        """End the running backward, if any."""
        if self._order:
            self._known, self._order = self._found, ()

    def forget(self) -> None:
        """Forget all, because the model's units change."""
        self._known, self._order = {}, ()
        self._first = self._at = self._stop = 0

    def ran(self, unit: Unit) -> None:
        """Record that a unit is computed again, in the current segment or the first of another."""
        order, first = self._order, self._first
        for at in range(self._at + 1, self._stop):
            if order[at] is unit:
                self._at = at
                self._found[_site(order[first])] = _site(unit)
                return
        for at in range(first - 1, -1, -1):
            if order[at] is unit:
                self._first, self._at, self._stop = at, at, first
                self._found[_site(unit)] = _site(unit)
                return

    def spans(self, visits: Sequence[Visit[Slot]]) -> list[range]:
        """Return the segments of the forwards before a backward, as ranges of ``visits``."""
        stops: dict[int, int] = {}
        first, before, last = 0, "", None
        for number, visit in enumerate(visits if self._known else ()):
            assert isinstance(visit.unit, Unit)
            site = _site(visit.unit)
            # Experts of one module, one after the other, begin one segment at most.
            if site in self._known and (site != before or visit.unit.number is None):
                first, last = number, self._known[site]
            if site == last:
                stops[first] = number + 1
            elif first in stops:
                last = None
            before = site
        return [range(first, stop) for first, stop in stops.items()]


def _site(unit: Unit) -> str:
    """Return the path of a unit's module, without an expert's number: it may differ next time."""
    return split_path(unit.path)[0]
