"""The search: `plan` tries a bounded number of choices, in a fixed order, and returns the best.

[Note: how it searches]

1. *Moving alone*, for a third of the allowance. What does not fit leaves by one of the rules of
   `choosing`, under the capacity less a share for look-ahead; what the transfers left room for is
   kept after all. From the best of these it goes on by steps.
2. *Computing again alone*: as many calls as it takes to move nothing.
3. *Both*, from the better of the two, by steps.

A *step* turns one gap over, and what then does not fit leaves, what then has room stays; or it
turns a call over; or it ranks one transfer before or after all others. Whatever is better is taken.
When no step is, a few decisions are turned over and it goes on from there.

The allowance is in slots and gaps gone through, so that large steps come to an end in time. Going
through them once takes n log n.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

from dynoffload.errors import BudgetError
from dynoffload.experiments.planner.choosing import (
    Choice,
    Chooser,
    cheapest,
    farthest,
    longest,
)
from dynoffload.experiments.planner.plan import Plan, plan_of
from dynoffload.experiments.planner.problem import Again, Problem
from dynoffload.experiments.planner.windows import FIRST, LAST, ORDERS, Order, room_of

ALLOWANCE = 250_000
"""Slots and gaps that a search may go through, beyond its first choices."""
SHARES = (0.0, 0.15, 0.4, 0.7)
_BETTER = 1e-9  # relative: less is rounding
_PARTS = 3  # of the allowance, one is for moving alone
_WORSE = 1.02  # times the best: what the search goes on from


def plan(
    problem: Problem, *, allowance: int = ALLOWANCE, move: bool = True, again: bool = True
) -> Plan:
    """Return a plan for ``problem``; the same for the same problem on every machine.

    Args:
        problem: the step, the budget and the link.
        allowance: how far to search; see `ALLOWANCE`.
        move: whether what is there to begin with may leave; without it regions are only dropped to
            be recomputed.
        again: whether anything may be recomputed.

    Raises:
        BudgetError: without ``move``, if what has to be there at one time does not fit.
    """
    return plan_of(_Search(problem, allowance, move, again).best())


class _Search:
    def __init__(self, problem: Problem, allowance: int, move: bool, again: bool) -> None:
        self._problem = problem
        self._chooser = Chooser(problem)
        self._allowance = self._limit = allowance
        self._move, self._again = move, again
        self._best: Choice | None = None
        self._floor = problem.compute_s

    def best(self) -> Choice:
        """Return the best choice: of those that move alone first, then of all.

        The first part is the same whether anything may be recomputed or not, so that having
        the choice is never a loss.
        """
        calls = self._again and bool(self._problem.again)
        if self._move:
            self._offer(self._first(()))
            self._again, self._limit = False, self._allowance // _PARTS
            self._climb()
        if calls or not self._move:
            self._offer(self._recomputed(self._problem.again if calls else ()))
            self._again, self._limit = True, self._allowance
            if self._move:
                self._climb()
        if self._best is None:
            raise BudgetError(
                "with nothing moved, more must be in fast memory at one time than there is room "
                f"for ({self._problem.capacity} bytes), whatever is recomputed: raise the "
                "budget, or let regions be moved"
            )
        return self._best

    def _offer(self, choice: Choice | None) -> bool:
        """Take note of a choice; return whether it is the best so far."""
        if choice is None or choice.seconds == float("inf"):
            return False
        best = self._best
        if best is not None and choice.seconds >= best.seconds * (1 - _BETTER):
            return False
        self._best = choice
        return True

    @property
    def _over(self) -> bool:
        assert self._best is not None
        return self._chooser.spent >= self._limit or self._best.seconds <= self._floor * (
            1 + _BETTER
        )

    # First choices

    def _first(self, active: Collection[int]) -> Choice | None:
        """Return the best choice by rule."""
        chooser = self._chooser
        layout = chooser.layout(active)
        if not layout.feasible:
            return None
        capacity = self._problem.capacity
        best: Choice | None = None
        small = (layout.slots + len(layout)) * 100 < self._allowance
        for rule in (farthest, longest, cheapest) if small else (farthest,):
            for share in SHARES if small else SHARES[1:2]:
                limit = capacity - int(share * capacity)
                moved = chooser.filled(layout, layout.absent, limit, rule)
                if moved is None:
                    continue
                choice = chooser.spared(
                    chooser.rated(layout, moved, ORDERS if small else ORDERS[:1])
                )
                if best is None or choice.seconds < best.seconds:
                    best = choice
        return best

    def _recomputed(self, again: Sequence[Again]) -> Choice | None:
        """Return a choice that moves nothing but what is absent, with few seconds of recomputation.

        Calls are taken in the order of the bytes that they free in the fullest slots, for each
        second that they take.
        """
        chooser, problem = self._chooser, self._problem
        gone = [sum(problem.sizes[region] for region in call.makes) for call in again]
        at_once = 1 + len(again) // 16
        active: set[int] = set()
        while True:
            layout = chooser.layout(active)
            room = room_of(layout, layout.absent)
            if min(room, default=0) >= 0:
                return chooser.rated(layout, layout.absent)
            over = list(accumulate((left < 0 for left in room), initial=0))
            gains: list[tuple[float, int]] = []
            for number, call in enumerate(again):
                first, last = problem.slot_of_use[call.stop - 1], problem.slot_of_again[number]
                gain = (over[last] - over[first + 1]) * gone[number]
                if gain and number not in active:
                    gains.append((-gain / max(call.seconds, 1e-12), number))
            added = 0
            for _, number in sorted(gains):
                if not any(again[other].overlaps(again[number]) for other in active):
                    active.add(number)
                    added += 1
                    if added == at_once:
                        break
            if not added:
                return None

    # Steps

    def _climb(self) -> None:
        """Go from choice to choice until the allowance is used up."""
        assert self._best is not None
        chance = random.Random(0)
        current = self._descend(self._best)
        while not self._over:
            turned = self._turned(current, chance)
            if turned is None:
                break
            found = self._descend(turned)
            assert self._best is not None
            current = found if found.seconds <= self._best.seconds * _WORSE else self._best
        for _ in range(4):  # a gap whose two transfers meet is kept
            self._offer(self._chooser.spared(self._best))

    def _descend(self, current: Choice) -> Choice:
        """Return a choice from which no step is better."""
        better = True
        while better and not self._over:
            better = False
            for step in (self._gaps, self._calls):
                found = step(current)
                if found.seconds < current.seconds * (1 - _BETTER):
                    current, better = found, True
                    self._offer(current)
        return current

    def _calls(self, current: Choice) -> Choice:
        """Turn calls over, the most promising first, as long as that is better."""
        if not (self._again and self._problem.again):
            return current
        for number in self._promising(current):
            if self._over:
                break
            choice = self._with(current, self._toggled(current.layout.active, number))
            if choice is not None and choice.seconds < current.seconds * (1 - _BETTER):
                current = choice
                self._offer(current)
        return current

    def _toggled(self, active: Collection[int], number: int) -> set[int]:
        """Return ``active`` with one call turned over, and without those that it shuts out."""
        again = self._problem.again
        if number in active:
            return set(active) - {number}
        return {n for n in active if not again[n].overlaps(again[number])} | {number}

    def _with(self, current: Choice, active: Collection[int]) -> Choice | None:
        """Return ``current`` with other calls recomputed."""
        chooser = self._chooser
        layout = chooser.layout(active)
        if not layout.feasible:
            return None
        decided, ranks = chooser.carried(current, active)
        moved = chooser.filled(layout, decided, self._problem.capacity)
        if moved is None:
            return None
        return chooser.spared(chooser.rated(layout, moved, ranks=ranks))

    def _promising(self, current: Choice) -> list[int]:
        """Return the calls in the order of what they could save."""
        windows = current.windows()
        layout, again = current.layout, self._problem.again
        waits: dict[int, float] = {}
        for gap, left in enumerate(windows.left):
            waits[layout.region[gap]] = waits.get(layout.region[gap], 0.0) + left
        for content, left in enumerate(windows.unsaved):
            if left:
                region = layout.region[layout.gaps_of[content][0]]
                waits[region] = waits.get(region, 0.0) + left

        def saving(number: int) -> float:
            call = again[number]
            saved = sum(waits.get(region, 0.0) for region in call.makes) - call.seconds
            return -saved if number in layout.active else saved

        return sorted(range(len(again)), key=lambda number: (-saving(number), number))

    def _gaps(self, current: Choice) -> Choice:
        """Turn gaps over and rank their transfers, as long as that is better."""
        windows = current.windows()
        layout = current.layout

        def rank(gap: int) -> tuple[float, int]:
            exposed = windows.left[gap]
            if layout.content[gap] >= 0:
                exposed += windows.unsaved[layout.content[gap]]
            return (-exposed, gap)

        for gap in sorted(range(len(layout)), key=rank):
            for turn in (self._ranked, self._turn):
                if self._over:
                    return current
                for choice in turn(current, gap):
                    if choice.seconds < current.seconds * (1 - _BETTER):
                        current = choice
                        self._offer(current)
                        break
        for order in (*ORDERS, *(order | Order.SHARED_ANEW for order in ORDERS)):
            choice = self._chooser.rated(layout, current.moved, (order,), current.ranks)
            if choice.seconds < current.seconds * (1 - _BETTER):
                current = choice
        return current

    def _ranked(self, current: Choice, gap: int) -> Iterator[Choice]:
        """Yield ``current`` with other ranks for the transfers of a gap."""
        layout = current.layout
        if not current.moved[gap]:
            return
        for key, has in ((gap, layout.fetch[gap]), (~gap, layout.content[gap] >= 0)):
            if not has:
                continue
            rank = current.ranks.get(key, 0)
            for other in (FIRST, LAST, 0):
                if other != rank:
                    ranks = {**current.ranks, key: other}
                    yield self._chooser.rated(layout, current.moved, (current.order,), ranks)

    def _turn(self, current: Choice, gap: int) -> Iterator[Choice]:
        """Yield ``current`` with a gap turned over."""
        chooser, layout = self._chooser, current.layout
        if layout.absent[gap]:
            return
        moved = list(current.moved)
        moved[gap] = not moved[gap]
        orders = (current.order,)
        if moved[gap]:
            choice = chooser.rated(layout, moved, orders, current.ranks)
            yield choice
            yield chooser.spared(choice)
            return
        for rule in (farthest, cheapest):
            filled = chooser.filled(layout, moved, self._problem.capacity, rule, keep=(gap,))
            if filled is not None:
                choice = chooser.rated(layout, filled, orders, current.ranks)
                yield choice
                if filled != moved:
                    yield chooser.spared(choice)

    def _turned(self, current: Choice, chance: random.Random) -> Choice | None:
        """Return ``current`` with a few decisions turned over at random."""
        chooser, problem = self._chooser, self._problem
        active: Collection[int] = current.layout.active
        if self._again and problem.again and chance.random() < 0.5:
            for _ in range(chance.randint(1, 2)):
                active = self._toggled(active, chance.randrange(len(problem.again)))
            if not chooser.layout(active).feasible:
                active = current.layout.active
        layout = chooser.layout(active)
        free = [gap for gap in range(len(layout)) if not layout.absent[gap]]
        if not free:
            return None
        moved, ranks = chooser.carried(current, layout.active)
        if chance.random() < 0.3:
            ranks = {}
        turned = chance.sample(free, min(len(free), 1 + chance.randrange(4)))
        for gap in turned:
            moved[gap] = not moved[gap]
        keep = [gap for gap in turned if not moved[gap]]
        filled = chooser.filled(layout, moved, problem.capacity, farthest, keep=keep)
        if filled is None:
            filled = chooser.filled(layout, moved, problem.capacity)
        chooser.spent += 1
        return current if filled is None else chooser.rated(layout, filled, ranks=ranks)
