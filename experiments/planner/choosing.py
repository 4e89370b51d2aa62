"""Choosing which gaps are moved: first choices by rule, and steps from one choice to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dynoffload.experiments.planner.layout import Layout
from dynoffload.experiments.planner.problem import Problem
from dynoffload.experiments.planner.windows import ORDERS, PLAIN, Order, Windows

_LAYING = 3  # times as long as going through it
Rule = Callable[[Layout, int], float]
"""How gladly a gap of a layout is moved: the lowest first."""


def farthest(layout: Layout, gap: int) -> float:
    """What is used last leaves first (Belady 1966)."""
    return -layout.after[gap]


def longest(layout: Layout, gap: int) -> float:
    """What is gone for the most slots leaves first."""
    return layout.before[gap] - layout.after[gap]


def cheapest(layout: Layout, gap: int) -> float:
    """What takes the least of the link for each slot leaves first, whatever its bytes."""
    seconds = layout.read_s[gap] * layout.fetch[gap]
    if layout.content[gap] >= 0:
        seconds += layout.write_s[gap]
    return seconds / (layout.size[gap] * (layout.after[gap] - layout.before[gap]))


@dataclass(frozen=True)
class Choice:
    """Which gaps of a layout are moved, and the seconds of the step.

    Attributes:
        layout: what is recomputed.
        moved: for each gap of the layout.
        seconds: of the step; infinite if it does not fit.
        order: see `Windows`.
        ranks: see `Windows`.
    """

    layout: Layout
    moved: tuple[bool, ...]
    seconds: float
    order: Order = PLAIN
    ranks: Mapping[int, int] = field(default_factory=dict)

    def windows(self) -> Windows:
        """Return where its transfers run."""
        return Windows(self.layout, self.moved, self.order, self.ranks)


class Chooser:
    """Makes choices for one problem.

    Attributes:
        problem: what is planned.
        spent: slots and gaps that were gone through so far; a measure of time that no clock is
            needed for, so that plans are the same on every machine.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.spent = 0
        self._layouts: dict[frozenset[int], Layout] = {}

    def layout(self, active: Collection[int]) -> Layout:
        """Return the layout in which ``active`` calls are recomputed."""
        key = frozenset(active)
        found = self._layouts.get(key)
        if found is None:
            found = Layout(self.problem, key)
            self.spent += _LAYING * (found.slots + len(found))
            if len(self._layouts) * len(found) > 1_000_000:
                self._layouts.clear()
            self._layouts[key] = found
        return found

    def rated(
        self,
        layout: Layout,
        moved: Sequence[bool],
        orders: Iterable[Order] = ORDERS,
        ranks: Mapping[int, int] | None = None,
    ) -> Choice:
        """Return the choice with its seconds, in the best of ``orders``."""
        ranks = ranks or {}
        moved = tuple(moved)
        best = Choice(layout, moved, float("inf"), ranks=ranks)
        floor = self.problem.compute_s + layout.again_s
        for order in orders:
            windows = Windows(layout, moved, order, ranks)
            self.spent += layout.slots + len(layout) + windows.work
            if not windows.feasible:
                break
            if floor + windows.exposed_s < best.seconds:
                best = Choice(layout, moved, floor + windows.exposed_s, order, ranks)
        return best

    def filled(
        self,
        layout: Layout,
        moved: Sequence[bool],
        limit: int,
        rule: Rule = farthest,
        keep: Iterable[int] = (),
    ) -> list[bool] | None:
        """Return ``moved`` with more gaps moved, so that all takes at most ``limit`` bytes.

        Where what a slot touches leaves less than that, nothing is kept there, except ``keep``.

        Returns:
            None if more than the capacity is taken somewhere even so.
        """
        moved = list(moved)
        self.spent += layout.slots + len(layout)
        spared = set(keep)
        starting: list[list[int]] = [[] for _ in range(layout.slots + 1)]
        ending = [0] * (layout.slots + 1)
        after, before, sizes = layout.after, layout.before, layout.size
        for gap, moves in enumerate(moved):
            if not moves:
                starting[before[gap] + 1].append(gap)
                ending[after[gap]] += sizes[gap]
        heap: list[tuple[float, int]] = []
        kept, capacity = 0, self.problem.capacity
        for slot, need in enumerate(layout.need):
            kept -= ending[slot]
            for gap in starting[slot]:
                kept += sizes[gap]
                if gap not in spared:
                    heappush(heap, (rule(layout, gap), gap))
            while need + kept > limit and heap:
                gap = heappop(heap)[1]
                if after[gap] > slot:
                    moved[gap] = True
                    kept -= sizes[gap]
                    ending[after[gap]] -= sizes[gap]
            if need + kept > capacity:
                return None
        return moved

    def spared(self, choice: Choice) -> Choice:
        """Return the choice with those gaps kept for which the transfers left room.

        All are taken back at first. Where that is too much, those go whose transfers are hidden,
        then those that are wanted last.
        """
        layout, windows = choice.layout, choice.windows()
        self.spent += layout.slots + len(layout) + windows.work
        if not windows.feasible:
            return choice
        start, stop, sizes = windows.start, windows.stop, layout.size
        moved = list(choice.moved)
        starting: list[list[int]] = [[] for _ in range(layout.slots + 1)]
        ending = [0] * (layout.slots + 1)
        for gap, moves in enumerate(choice.moved):
            if moves and not layout.absent[gap]:
                moved[gap] = False
                if stop[gap] < start[gap]:
                    starting[stop[gap]].append(gap)
                    ending[start[gap]] += sizes[gap]
        heap: list[tuple[float, int, int]] = []
        kept = 0
        for slot, room in enumerate(windows.room):
            kept -= ending[slot]
            for gap in starting[slot]:
                kept += sizes[gap]
                heappush(heap, (windows.left[gap], -start[gap], gap))
            while kept > room:
                _, end, gap = heappop(heap)
                if -end > slot:
                    moved[gap] = True
                    kept -= sizes[gap]
                    ending[-end] -= sizes[gap]
        again = self.rated(layout, moved, (choice.order,), choice.ranks)
        return min(choice, again, key=lambda one: one.seconds)

    def carried(self, choice: Choice, active: Collection[int]) -> tuple[list[bool], dict[int, int]]:
        """Return moved gaps and ranks of ``choice`` for another layout, new gaps being kept."""
        old, new = choice.layout, self.layout(active)
        if old is new:
            return list(choice.moved), dict(choice.ranks)
        place = {(old.region[gap], old.before[gap], old.after[gap]): gap for gap in range(len(old))}
        moved, ranks = list(new.absent), {}
        for gap in range(len(new)):
            was = place.get((new.region[gap], new.before[gap], new.after[gap]))
            if was is not None:
                moved[gap] = choice.moved[was]
                for one, other in ((was, gap), (~was, ~gap)):
                    if one in choice.ranks:
                        ranks[other] = choice.ranks[one]
        return moved, ranks
