"""Progress in a plan: the position, next uses, and the next transfer that is due.

The counterpart in Python of ``memory/native/plan.c``. A cursor knows neither residency nor room:
whoever follows a plan asks it, and says which actions were carried out or skipped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

from dynoffload.planning.schedule import Action, Kind, Use

NEVER = 2**62
"""Position of the next use of what no plan uses."""

_position_of = itemgetter(0)


class PlanCursor:
    """Follows one reference string and its schedule from position 0 on.

    Args:
        uses: the reference string.
        actions: of its schedule, in the order of execution.

    Attributes:
        position: the use that is under way; all before it are over.
    """

    def __init__(self, uses: Sequence[Use] = (), actions: Sequence[Action] = ()) -> None:
        self.position = 0
        self._uses, self._actions = uses, actions
        self._next: dict[int, int] = {}
        self._touches: list[tuple[int, int, int]] = []  # position, region, its next position
        self._past = self._acted = 0  # touches that are over, actions carried out or skipped
        for position in range(len(uses) - 1, -1, -1):
            for region in {*uses[position].regions, *uses[position].creates}:
                self._touches.append((position, region, self._next.get(region, NEVER)))
                self._next[region] = position
        self._touches.reverse()

    def next_use(self, region: int) -> int:
        """Return the first use of ``region`` from the current position on, or `NEVER`."""
        return self._next.get(region, NEVER)

    def regions(self) -> tuple[int, ...]:
        """Return the regions of the use that is under way."""
        return self._uses[self.position].regions if 0 <= self.position < len(self._uses) else ()

    def advance(self, position: int) -> list[int]:
        """Begin use ``position``; return the regions whose next use is another now.

        Going back, as where a fault seemed to prove a use past, repeats later actions.
        """
        changed = []
        if position < self.position:
            self._past = bisect_left(self._touches, position, key=_position_of)
            self._acted = bisect_left(self._actions, position, key=_position_of)
            for at, region, _ in reversed(self._touches[self._past :]):
                self._next[region] = at
                changed.append(region)
        while self._past < len(self._touches) and self._touches[self._past][0] < position:
            _, region, self._next[region] = self._touches[self._past]
            self._past += 1
            changed.append(region)
        self.position = position
        return changed

    def trade(self, one: int, other: int) -> None:
        """Two regions trade contents: their next uses are each other's from now on."""
        first, second = self.next_use(one), self.next_use(other)
        self._next[one], self._next[other] = second, first

    def coming(self, count: int) -> list[int]:
        """Return the regions of the next ``count`` fetches that are left, due or not."""
        left = self._actions[self._acted : self._acted + 2 * count]
        return [action.region for action in left if action.kind is Kind.FETCH][:count]

    def due(self) -> Action | None:
        """Return the first action left whose position is reached."""
        if self._acted < len(self._actions):
            action = self._actions[self._acted]
            if action.position <= self.position:
                return action
        return None

    def done(self) -> None:
        """Go past the action that `due` returned."""
        self._acted += 1
