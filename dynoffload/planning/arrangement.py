"""The arrangement of one procedure: a nested sequence of runs and loops, some of them optional.

What it is: `arrange`, which makes it from the pairs of slots that were seen one after the other,
and `Arranged`, which says how to get in it from one run to another. What it is not: the rule by
which slots are named, nor the place where the method is explained; for both see
`dynoffload.planning.flow`.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from dynoffload.planning.components import components
from dynoffload.planning.frames import Symbol

VARYING = 0
"""The occurrence in a slot whose symbol is not counted."""


class Name(NamedTuple):
    """What slots are told apart by, besides their number.

    Attributes:
        symbol: what runs.
        after: the operator right before an operator, ``""`` if that is none or does not matter.
    """

    symbol: Symbol
    after: str


class Slot(NamedTuple):
    """A place in a body: which of the occurrences (from 1) of a name, or `VARYING`."""

    name: Name
    occurrence: int


Graph = dict[Slot | None, dict[Slot | None, None]]
"""The slots seen after each; None is the beginning as a key and the end as a successor."""


@dataclass(eq=False, frozen=True, slots=True)
class Run:
    """Slots that are only ever filled together, one after the other."""

    slots: tuple[Slot, ...]


@dataclass(eq=False, slots=True)
class Series:
    """Elements in canonical order: a body, or one iteration of a loop.

    Attributes:
        elements: runs and loops.
        stops: at ``i``, the first required element from ``i`` on, or the number of elements: how
            far one who stands before element ``i`` can jump.
    """

    elements: tuple[Run | Loop, ...]
    stops: list[int] = field(default_factory=list)

    @property
    def choices(self) -> int:
        """How many places leave a choice of what comes next."""
        return sum(stop > index for index, stop in enumerate(self.stops))


@dataclass(eq=False, frozen=True, slots=True)
class Loop:
    """A series that is run one or more times."""

    body: Series


Place = tuple[tuple[Series, int], ...]
"""Where an element stands: the series around it, outermost first, and its index in each."""


class Move(NamedTuple):
    """A move within one series.

    Attributes:
        series: in which.
        start: the element left, -1 at the beginning.
        stop: the element reached, the number of elements at the end.
        again: whether a loop begins another iteration with it.
    """

    series: Series
    start: int
    stop: int
    again: bool


class Arranged:
    """The structure of a procedure.

    Attributes:
        top: the body.
        single: operators that run at most once in a body; what ran before them does not matter.
        coarse: names whose occurrences are not told apart.
        runs: the run of each slot, and the slot's index in it.
    """

    def __init__(
        self,
        top: Series,
        single: Collection[Symbol],
        coarse: Collection[Name],
        runs: Mapping[Slot, tuple[Run, int]],
    ) -> None:
        self.top = top
        self.single = single
        self.coarse = coarse
        self.runs = runs
        self._places = dict(_places(top, ()))
        self._moves: dict[tuple[Run | None, Run | None], tuple[Move, ...]] = {}

    def series(self) -> Iterator[Series]:
        """Yield the body and the bodies of all loops."""
        waiting = [self.top]
        while waiting:
            series = waiting.pop()
            yield series
            waiting.extend(e.body for e in series.elements if isinstance(e, Loop))

    def moves(self, left: Run | None, reached: Run | None) -> tuple[Move, ...]:
        """Return the moves from one run to another; None is the beginning, or the end."""
        moves = self._moves.get((left, reached))
        if moves is None:
            moves = self._moves[left, reached] = tuple(self._find(left, reached))
        return moves

    def _find(self, left: Run | None, reached: Run | None) -> Iterator[Move]:
        here: Place = ((self.top, -1),) if left is None else self._places[left]
        end: Place = ((self.top, len(self.top.elements)),)
        there: Place = end if reached is None else self._places[reached]
        depth = 0
        for ours, theirs in zip(here[:-1], there[:-1], strict=False):
            if ours != theirs:
                break
            depth += 1
        for series, index in reversed(here[depth + 1 :]):
            yield Move(series, index, len(series.elements), False)
        (series, index), target = here[depth], there[depth][1]
        if target > index:
            yield Move(series, index, target, False)
        else:
            yield Move(series, index, len(series.elements), False)
            yield Move(series, -1, target, True)
        for series, index in there[depth + 1 :]:
            yield Move(series, -1, index, False)


def projected(graph: Graph, renamed: Callable[[Slot], Slot]) -> Graph:
    """Return the successor relation of the slots under other names."""

    def rename(slot: Slot | None) -> Slot | None:
        return None if slot is None else renamed(slot)

    result: Graph = {}
    for slot, successors in graph.items():
        result.setdefault(rename(slot), {}).update((rename(after), None) for after in successors)
    return result


def coarsened(graph: Graph, coarse: Collection[Name]) -> Graph:
    """Return the successor relation when the occurrences of some names are not told apart."""
    return projected(graph, lambda slot: Slot(slot.name, VARYING) if slot.name in coarse else slot)


def arrange(most: Mapping[Symbol, int], counts: Mapping[Name, int], graph: Graph) -> Arranged:
    """Return the structure that the facts determine.

    Args:
        most: how often each symbol runs in one body at most.
        counts: how often each name runs where it runs, or `VARYING`.
        graph: the successor relation of the slots.
    """
    single = {symbol for symbol, count in most.items() if count == 1}
    graph = projected(
        graph, lambda s: Slot(Name(s.name.symbol, ""), 1) if s.name.symbol in single else s
    )
    coarse = {name for name, count in counts.items() if count == VARYING}
    while True:
        inner = {
            slot: [after for after in successors if after is not None]
            for slot, successors in graph.items()
            if slot is not None
        }
        cyclic = {
            slot.name
            for component in components(inner)
            if len(component) > 1
            for slot in component
            if slot.name.symbol not in single and slot.name not in coarse
        }
        if not cyclic:
            break
        coarse |= cyclic
        graph = coarsened(graph, cyclic)
    home = _runs(graph)
    after: Edges = {}
    for run in dict.fromkeys(home.values()):
        after[run] = {s if s is None else home[s]: None for s in graph[run.slots[-1]]}
    after[None] = {s if s is None else home[s]: None for s in graph[None]}
    positions = {slot: (run, i) for run in after if run for i, slot in enumerate(run.slots)}
    arranged = Arranged(_Arranging(after).top(), single, coarse, positions)
    _mark(arranged, after)
    return arranged


def _runs(graph: Graph) -> dict[Slot, Run]:
    """Return the run of each slot."""
    before: dict[Slot, list[Slot | None]] = {}
    for slot, successors in graph.items():
        for after in successors:
            if after is not None:
                before.setdefault(after, []).append(slot)
    joined: dict[Slot, Slot] = {}  # a slot -> the one that always follows it, and only it
    for slot, successors in graph.items():
        if slot is None or not isinstance(slot.name.symbol, str) or len(successors) != 1:
            continue
        (after,) = successors
        if after is not None and isinstance(after.name.symbol, str) and before[after] == [slot]:
            joined[slot] = after
    follows = set(joined.values())
    runs: dict[Slot, Run] = {}
    for slot in before:
        if slot not in follows:
            chain = [slot]
            while chain[-1] in joined:
                chain.append(joined[chain[-1]])
            runs.update(dict.fromkeys(chain, Run(tuple(chain))))
    return runs


Edges = dict[Run | None, dict[Run | None, None]]
"""The runs seen after each; None as in `Graph`."""


class _Arranging:
    """The work of putting the runs of one procedure in order."""

    def __init__(self, after: Edges) -> None:
        nodes = [run for run in after if run is not None]
        nodes.sort(key=lambda run: _natural(run.slots[0]))
        self._rank = {run: number for number, run in enumerate(nodes)}
        self._forward = {run: [s for s in after[run] if s is not None] for run in nodes}
        self._before: dict[Run, list[Run | None]] = {run: [] for run in nodes}
        for run, successors in after.items():
            for successor in successors:
                if successor is not None:
                    self._before[successor].append(run)

    def top(self) -> Series:
        """Return the body."""
        return self._series(list(self._rank), self._forward)

    def _series(self, nodes: Sequence[Run], after: Mapping[Run, Sequence[Run]]) -> Series:
        """Arrange runs, given by rank, by the edges among them that do not lead back."""
        groups = components(after)
        home = {node: number for number, group in enumerate(groups) for node in group}
        following: list[set[int]] = [set() for _ in groups]
        for node in nodes:
            following[home[node]].update(home[successor] for successor in after[node])
        waits = [0] * len(groups)
        for number, successors in enumerate(following):
            successors.discard(number)
            for successor in successors:
                waits[successor] += 1
        rank = [min(self._rank[node] for node in group) for group in groups]
        ready = [(rank[number], number) for number, count in enumerate(waits) if count == 0]
        heapq.heapify(ready)
        elements: list[Run | Loop] = []
        while ready:
            number = heapq.heappop(ready)[1]
            elements.append(self._element(groups[number], after))
            for successor in following[number]:
                waits[successor] -= 1
                if waits[successor] == 0:
                    heapq.heappush(ready, (rank[successor], successor))
        return Series(tuple(elements))

    def _element(self, group: Sequence[Run], after: Mapping[Run, Sequence[Run]]) -> Run | Loop:
        """Return the one run of a component, or its loop."""
        if len(group) == 1 and group[0] not in after[group[0]]:
            return group[0]
        inside = sorted(group, key=self._rank.__getitem__)
        within = set(inside)
        heads = {node for node in inside if any(b not in within for b in self._before[node])}
        body = {node: [s for s in after[node] if s in within and s not in heads] for node in inside}
        return Loop(self._series(inside, body))


def _natural(slot: Slot) -> tuple[object, ...]:
    """Return the key of slots that nothing else puts in order: by name, numbers as numbers."""
    parts = re.split(r"(\d+)", str(slot.name.symbol))
    digits = tuple((int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts))
    return (digits, isinstance(slot.name.symbol, str), slot.name.after, slot.occurrence)


def _places(series: Series, outer: Place) -> Iterator[tuple[Run, Place]]:
    for index, element in enumerate(series.elements):
        place = (*outer, (series, index))
        if isinstance(element, Loop):
            yield from _places(element.body, place)
        else:
            yield element, place


def _mark(arranged: Arranged, after: Edges) -> None:
    """Say which elements are required: those that no edge jumps over."""
    jumps = {series: [0] * (len(series.elements) + 1) for series in arranged.series()}
    for run, successors in after.items():
        for successor in successors:
            for move in arranged.moves(run, successor):
                if move.stop > move.start + 1:
                    jumps[move.series][move.start + 1] += 1
                    jumps[move.series][move.stop] -= 1
    for series, changes in jumps.items():
        stops = [len(series.elements)]
        depths = list(accumulate(changes))
        for index in range(len(series.elements) - 1, -1, -1):
            stops.append(stops[-1] if depths[index] else index)
        series.stops = stops[::-1]
