"""Segments of a forward that activation checkpointing computes again during backward.

Backward goes through the segments in reverse. It computes each again, unit by unit, and then goes
back through it. The units that run during a backward show where segments begin.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynoffload.planning.reference import Visit
from dynoffload.profiler.experts import split_path
from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.adoption.units import Unit


class Segments:
    """What the last backward recomputed, for the plan of the next."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # first module of a segment -> its last
        self._found: dict[str, str] = {}  # in the running backward
        self._order: Sequence[Unit] = ()  # of the forwards whose backward runs
        self._first = self._at = self._stop = 0  # of the segment that is recomputed, in `_order`

    def __bool__(self) -> bool:
        return bool(self._known)

    def begin_backward(self, order: Sequence[Unit]) -> None:
        """Begin the backward of forwards that ran the units in ``order``, and end the last."""
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
        """Record that a unit runs again during backward."""
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
        """Return the segments of a forward, as ranges of ``visits``."""
        stops: dict[int, int] = {}
        first, before, last = 0, "", None
        for number, visit in enumerate(visits if self._known else ()):
            assert isinstance(visit.unit, Unit)
            site = _site(visit.unit)
            if site in self._known and (site != before or visit.unit.number is None):
                first, last = number, self._known[site]
            if site == last:
                stops[first] = number + 1
            elif first in stops:
                last = None
            before = site
        return [range(first, stop) for first, stop in stops.items()]


def _site(unit: Unit) -> str:
    """Return the path of a unit's module: other experts may be hit in the next step."""
    return split_path(unit.path)[0]
