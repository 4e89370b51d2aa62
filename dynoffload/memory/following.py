"""Where a device is in what it follows: position, next uses, and the next action that is due.

The counterpart in Python of ``native/plan.c``. It knows neither residency nor room; the device
asks it, and says which actions it has carried out or skipped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from dynoffload.planning.schedule import Action, Kind, Use

NEVER = 2**63 - 1


class Following:
    """One reference string and its schedule, followed from position 0 on.

    Args:
        uses: the reference string.
        actions: of its schedule, in the order of execution.
    """

    def __init__(self, uses: Sequence[Use] = (), actions: Sequence[Action] = ()) -> None:
        self.position = 0
        self._uses = uses
        self._actions = actions
        self._next = 0  # the first action not yet carried out or skipped
        self._positions: dict[int, list[int]] = {}
        for at, use in enumerate(uses):
            for region in {*use.regions, *use.creates}:
                self._positions.setdefault(region, []).append(at)

    def next_use(self, region: int) -> int:
        """Return the first use of ``region`` from the current position on, or `NEVER`."""
        positions = self._positions.get(region)
        if positions is None:
            return NEVER
        index = bisect_left(positions, self.position)
        return positions[index] if index < len(positions) else NEVER

    def advance(self, position: int) -> tuple[int, ...]:
        """Begin use ``position`` and return its regions; going back repeats later actions."""
        if position < self.position:
            self._next = bisect_left(self._actions, position, key=lambda action: action.position)
        self.position = position
        return self._uses[position].regions if 0 <= position < len(self._uses) else ()

    def coming(self, count: int) -> list[int]:
        """Return the regions of the next ``count`` fetches that are left, due or not."""
        left = self._actions[self._next : self._next + 2 * count]
        return [action.region for action in left if action.kind is Kind.FETCH][:count]

    def due(self) -> Action | None:
        """Return the first action left whose position is reached."""
        if self._next < len(self._actions):
            action = self._actions[self._next]
            if action.position <= self.position:
                return action
        return None

    def done(self) -> None:
        """Go past the action that `due` returned."""
        self._next += 1
