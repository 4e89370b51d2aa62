"""Progress in a plan: the position, next uses, and the next transfer that is due.

The Python counterpart of ``memory/native/plan.c``. A cursor knows neither residency nor free
memory: its caller executes or skips the actions and marks them done.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

from dynoffload.planning.schedule import Action, Kind, Use

NEVER = 2**62
"""Position of the next use of a region that the plan does not use again."""

_position_of = itemgetter(0)


class PlanCursor:
    """Follows one reference string and its schedule from position 0 on.

    Args:
        uses: the reference string.
        actions: the actions of its schedule, in the order of execution.

    Attributes:
        position: the current use; all before it are over.
    """

    def __init__(self, uses: Sequence[Use] = (), actions: Sequence[Action] = ()) -> None:
        self.position = 0
        self._uses, self._actions = uses, actions
        self._next: dict[int, int] = {}
        self._touches: list[tuple[int, int, int]] = []  # position, region, its next position
        self._past = self._acted = 0  # touches that are over, actions executed or skipped
        for position in range(len(uses) - 1, -1, -1):
            for region in {*uses[position].regions, *uses[position].creates}:
                self._touches.append((position, region, self._next.get(region, NEVER)))
                self._next[region] = position
        self._touches.reverse()

    def next_use(self, region: int) -> int:
        """Return the first use of ``region`` from the current position on, or `NEVER`."""
        return self._next.get(region, NEVER)

    def regions(self) -> tuple[int, ...]:
        """Return the regions of the current use."""
        return self._uses[self.position].regions if 0 <= self.position < len(self._uses) else ()

    def advance(self, position: int) -> list[int]:
        """Begin use ``position``; return the regions whose next use changed.

        Going back is allowed, for example after a fault advanced the position too far; the later
        actions are then due again."""
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

    def coming(self, count: int) -> list[int]:
        """Return the regions of the next ``count`` remaining fetches, due or not."""
        left = self._actions[self._acted : self._acted + 2 * count]
        return [action.region for action in left if action.kind is Kind.FETCH][:count]

    def due(self) -> Action | None:
        """Return the first remaining action if its position is reached, else None."""
        if self._acted < len(self._actions):
            action = self._actions[self._acted]
            if action.position <= self.position:
                return action
        return None

    def done(self) -> None:
        """Mark the action that `due` returned as done."""
        self._acted += 1
