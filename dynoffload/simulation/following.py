"""What a policy expects of a simulated step, and how far the step has come in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.schedule import Schedule, Use


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


class Following(PlanCursor):
    """Progress in a plan whose uses are found by their keys.

    Args:
        plan: None expects nothing.

    Attributes:
        strict: the first use that is not the one expected ends it.
    """

    def __init__(self, plan: Plan | None) -> None:
        if plan is None:
            super().__init__()
        else:
            super().__init__(plan.uses, plan.schedule.actions)
        self.strict = plan is not None and plan.strict
        self._places: dict[Hashable, list[int]] = {}
        for position, key in enumerate(() if plan is None else plan.keys):
            self._places.setdefault(key, []).append(position)

    def find(self, key: Hashable) -> int:
        """Return the next position of the use that is known by ``key``; -1 if there is none."""
        places = self._places.get(key, ())
        index = bisect_left(places, self.position)
        return places[index] if index < len(places) else -1
