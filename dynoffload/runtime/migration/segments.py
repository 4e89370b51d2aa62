"""Segments of a forward that activation checkpointing computes again during backward.

Backward goes through the segments in reverse. It computes each again, unit by unit, and then goes
back through it. The units that run during a backward show where segments begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from dynoffload.planning.reference import Visit
from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.adoption.units import Unit


class Segments:
    """What the last backward recomputed, for the plan of the next."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}  # index of a segment's first unit -> path of all its units
        self._found: dict[int, str] = {}  # in the running backward
        self._order: Sequence[Unit] = ()  # of the forwards whose backward runs
        self._first = self._at = self._stop = 0  # of the segment that is recomputed, in `_order`

    def __bool__(self) -> bool:
        return bool(self._known)

    def begin_backward(self, order: Sequence[Unit]) -> None:
        """Begin the backward of forwards that ran the units in ``order``."""
        self._order, self._found = order, {}
        self._first = self._at = self._stop = len(order)

    def end_backward(self) -> None:
        """End the running backward, if any."""
        if self._order:
            self._known, self._order = self._found, ()

    def forget(self) -> None:
        """Forget all, because the model's units change."""
        self._known, self._order = {}, ()

    def ran(self, unit: Unit) -> None:
        """Record that a unit runs again during backward."""
        order, first = self._order, self._first
        for at in range(self._at + 1, self._stop):
            if order[at] is unit:
                self._at = at
                start = order[first].index
                self._found[start] = _shared(self._found[start], unit.path)
                return
        for at in range(first - 1, -1, -1):
            if order[at] is unit:
                self._first, self._at, self._stop = at, at, first
                self._found.setdefault(unit.index, unit.path)
                return

    def spans(self, visits: Sequence[Visit[Slot]]) -> list[range]:
        """Return the segments of a forward, as ranges of ``visits``."""
        found: list[range] = []
        inside = None
        for number, visit in enumerate(visits):
            prefix = self._known.get(visit.unit.index)
            unit = visit.unit
            assert isinstance(unit, Unit)
            if prefix is not None:
                found.append(range(number, number + 1))
                inside = prefix
            elif inside is not None and unit.path.startswith(inside):
                found[-1] = range(found[-1].start, number + 1)
            else:
                inside = None
        return found


def _shared(one: str, other: str) -> str:
    """Return the path of the module that has both, with a dot; "" if that is the root."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return "".join(f"{name}." for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
