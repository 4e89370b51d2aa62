"""A plan, and how far a step has come in it.

`Following` counts as the pager does (``memory/native/plan.c``): each region has a next use, which
two regions that trade contents trade too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from dynoffload.planning.schedule import Action, Schedule, Use

NEVER = 2**62
"""Position of the next use of what no plan uses."""


@dataclass(frozen=True)
class Plan:
    """What a policy expects of a step, and what it does about it.

    Attributes:
        keys: what each expected use is known by; the step finds its place by them.
        uses: the expected uses.
        schedule: of those.
        strict: the first use that is not the one expected ends the plan.
    """

    keys: Sequence[Hashable]
    uses: Sequence[Use]
    schedule: Schedule
    strict: bool = False


class Following:
    """Progress in a plan.

    Args:
        plan: None expects nothing.

    Attributes:
        position: uses of the plan that are over.
        strict: the first use that is not the one expected ends it.
    """

    def __init__(self, plan: Plan | None) -> None:
        self.position = 0
        self.strict = plan is not None and plan.strict
        self._next: dict[int, int] = {}
        self._uses: list[tuple[int, int, int]] = []  # position, region, its next position
        self._actions: Sequence[Action] = ()
        self._places: dict[Hashable, list[int]] = {}
        self._used = self._acted = 0
        if plan is not None:
            self._read(plan)

    def _read(self, plan: Plan) -> None:
        for position in range(len(plan.uses) - 1, -1, -1):
            use = plan.uses[position]
            for region in {*use.regions, *use.creates}:
                self._uses.append((position, region, self._next.get(region, NEVER)))
                self._next[region] = position
        self._uses.reverse()
        self._actions = plan.schedule.actions
        for position, key in enumerate(plan.keys):
            self._places.setdefault(key, []).append(position)

    def next_use(self, region: int) -> int:
        """Return the position at which ``region`` is used next, or `NEVER`."""
        return self._next.get(region, NEVER)

    def find(self, key: Hashable) -> int:
        """Return the next position of the use that is known by ``key``; -1 if there is none."""
        places = self._places.get(key, ())
        index = bisect_left(places, self.position)
        return places[index] if index < len(places) else -1

    def advance(self, position: int) -> Iterator[int]:
        """Progress has reached ``position``; yield the regions whose next use is another now.

        Where that lies before, as where a fault seemed to prove a use past, it counts from there.
        """
        if position < self.position:
            yield from self._go_back(position)
            return
        self.position = position
        while self._used < len(self._uses) and self._uses[self._used][0] < position:
            _, region, following = self._uses[self._used]
            self._next[region] = following
            self._used += 1
            yield region

    def _go_back(self, position: int) -> Iterator[int]:
        self.position = position
        for place in range(len(self._uses) - 1, -1, -1):
            at, region, _ = self._uses[place]
            if at < position:
                break
            self._next[region] = at
            yield region
        self._used = bisect_left(self._uses, position, key=itemgetter(0))
        self._acted = bisect_left(self._actions, position, key=itemgetter(0))

    def trade(self, one: int, other: int) -> None:
        """The next uses of two regions are each other's from now on."""
        first, second = self.next_use(one), self.next_use(other)
        self._next[one], self._next[other] = second, first

    def due(self) -> Action | None:
        """Return the next transfer that may begin, None if there is none."""
        if self._acted == len(self._actions):
            return None
        action = self._actions[self._acted]
        return action if action.position <= self.position else None

    def done(self) -> None:
        """What is `due` has begun, or was overtaken."""
        self._acted += 1
