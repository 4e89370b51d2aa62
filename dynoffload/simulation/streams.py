"""Work on three resources of every rank: compute, the link to other ranks, and copies to the host.

[Note: order]  A resource of a rank does one task at a time, in the order in which they were added,
as streams do. A task on the link is a collective: it begins when its turn has come on all ranks,
lasts as long as the longest of its ranks says, and ends on all of them at once. So a step lasts
as long as the slowest rank makes each collective wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dynoffload.errors import ConfigError

Floats = NDArray[np.float64]


class Resource(Enum):
    """What a task occupies."""

    COMPUTE = 0
    LINK = 1
    COPY = 2


@dataclass(frozen=True)
class Task:
    """One task: seconds from the beginning at which each rank starts and ends it."""

    name: str
    resource: Resource
    start: Floats
    end: Floats


class Timeline:
    """Tasks of all ranks, and when they run.

    Args:
        ranks: how many there are.

    Attributes:
        tasks: in the order in which they were added.
    """

    def __init__(self, ranks: int) -> None:
        self.tasks: list[Task] = []
        self._ranks = ranks
        self._free = {resource: np.zeros(ranks) for resource in Resource}

    def add(
        self,
        name: str,
        resource: Resource,
        seconds: float | Sequence[float] | Floats,
        after: Sequence[int] = (),
    ) -> int:
        """Add a task behind all others of its resource, and return its number.

        Args:
            name: for readers.
            resource: it occupies; those on the link are collectives, see [Note: order].
            seconds: it takes, on all ranks or on each.
            after: numbers of tasks that must have ended before on the same rank.

        Raises:
            ConfigError: the seconds are negative or not finite, or a task to wait for does not
                exist yet.
        """
        own = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (self._ranks,))
        if not (np.isfinite(own).all() and (own >= 0).all()):
            raise ConfigError(f"task {name!r} takes {seconds} s: seconds are 0 or more, and finite")
        number = len(self.tasks)
        if any(not 0 <= other < number for other in after):
            raise ConfigError(f"task {name!r} is number {number} and waits for {tuple(after)}")
        start = self._free[resource]
        for other in after:
            start = np.maximum(start, self.tasks[other].end)
        if resource is Resource.LINK:
            start, own = np.full(self._ranks, start.max()), np.full(self._ranks, own.max())
        self._free[resource] = end = start + own
        self.tasks.append(Task(name, resource, start, end))
        return number

    @property
    def seconds(self) -> float:
        """Until the last rank has ended."""
        return max((float(task.end.max()) for task in self.tasks), default=0.0)

    def busy(self, resource: Resource) -> Floats:
        """Return the seconds that each rank's ``resource`` works; what waits does not."""
        found = np.zeros(self._ranks)
        for task in self.tasks:
            if task.resource is resource:
                found = found + (task.end - task.start)
        return found
