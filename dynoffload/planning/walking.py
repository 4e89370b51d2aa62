"""Bodies and decisions: from one to the other and back.

What it is: `Frame`, which lays one body of a procedure over its arrangement and notes what is
decided, and `walk`, which makes the body of the decisions. What it is not: aware of how frames nest
(see `dynoffload.planning.structure`); both hand on what a child decides in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynoffload.errors import TraceError
from dynoffload.planning.arrangement import Loop, Run, Series
from dynoffload.planning.flow import Flow, Reader
from dynoffload.planning.frames import Procedure, Symbol


class Unseen(Exception):
    """A sample did what no merged sample did."""

    def __init__(self, procedure: Procedure | None, after: Symbol | None, symbol: Symbol | None):
        super().__init__()
        self.procedure = procedure
        self.after = after
        self.symbol = symbol


class Frame:
    """One frame of a trace while it is laid over its procedure."""

    def __init__(self, procedure: Procedure | None, flow: Flow, decisions: list[int]) -> None:
        self._procedure = procedure
        self._flow = flow
        self._arranged = flow.arranged
        self._decisions = decisions
        self._reader = Reader(flow.arranged)
        self._run: Run | None = None
        self._offset = 0
        self._symbol: Symbol | None = None
        self._counts: dict[Series, int] = {}  # a loop's body -> where its count stands

    def enter(self, symbol: Symbol) -> None:
        """Go on to the next symbol."""
        slot = self._reader.slot(symbol)
        run, offset = self._arranged.runs.get(slot, (None, 0))
        whole = self._run is None or self._offset + 1 == len(self._run.slots)
        fits = offset == 0 if whole else run is self._run and offset == self._offset + 1
        if run is None or not fits:
            raise Unseen(self._procedure, self._symbol, symbol)
        if whole:
            self._move(run, symbol)
        self._run, self._offset, self._symbol = run, offset, symbol

    def end(self) -> None:
        """Say that the frame is over."""
        if self._run is not None and self._offset + 1 != len(self._run.slots):
            raise Unseen(self._procedure, self._symbol, None)
        self._move(None, None)

    def _move(self, run: Run | None, symbol: Symbol | None) -> None:
        """Note the decisions that lead from the run at hand to another one."""
        decisions = self._decisions
        for series, start, target, again in self._arranged.moves(self._run, run):
            if start < 0 and series is not self._arranged.top:
                if again:
                    decisions[self._counts[series]] += 1
                else:
                    self._counts[series] = len(decisions)
                    decisions.append(1)
            elif again:
                raise Unseen(self._procedure, self._symbol, symbol)
            stop = series.stops[start + 1]
            if target > stop:
                raise Unseen(self._procedure, self._symbol, symbol)
            if stop > start + 1:
                decisions.append(target - start - 1)


def walk(series: Series, decisions: Iterator[int]) -> Iterator[Symbol]:
    """Yield the symbols of a body, taking decisions where there are any to take."""
    index = 0
    while True:
        stop = series.stops[index]
        if stop > index:
            index += _decided(decisions, 0, stop - index)
        if index == len(series.elements):
            return
        element = series.elements[index]
        if isinstance(element, Loop):
            for _ in range(_decided(decisions, 1, None)):
                yield from walk(element.body, decisions)
        else:
            for slot in element.slots:
                yield slot.name.symbol
        index += 1


def _decided(decisions: Iterator[int], least: int, most: int | None) -> int:
    decision = next(decisions, -1)
    if decision < least or (most is not None and decision > most):
        raise TraceError("the path leads nowhere: it is damaged, find it again with path_of")
    return decision
