"""Work on three resources of every rank: compute, the link to other ranks, and copies to the host.

What it is: `Program`, a list of tasks that all ranks run, each rank with seconds of its own, and
when each task starts and ends. What it is not: what the tasks are (`pipeline`, `replicas`), or how
long one takes alone (`speeds`, `cluster`).

[Note: order]  A resource of a rank does one task at a time, in the order in which they were added,
as streams do. A task on the link is a collective: it begins when its turn has come on all ranks,
lasts as long as the longest of its ranks says, and ends on all of them at once. So a step lasts
as long as the slowest rank makes each collective wait.

[Note: side by side]  What runs on one resource may slow down what the same rank runs on another:
each pair has a factor, and the factors of both others multiply. A collective goes at the pace of
the rank that is slowed down most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynoffload.errors import ConfigError

Floats = NDArray[np.float64]
_SAME = 1e-9  # what ends within this part of an interval ends with it


class Resource(Enum):
    """What a task occupies; by its row in arrays."""

    COMPUTE = 0
    LINK = 1
    COPY = 2


@dataclass(frozen=True)
class Slowdown:
    """How many times as long one resource's work takes while another works.

    Raises:
        ConfigError: a factor is below 1 or not finite.
    """

    compute_beside_link: float = 1.0
    compute_beside_copy: float = 1.0
    link_beside_compute: float = 1.0
    link_beside_copy: float = 1.0
    copy_beside_compute: float = 1.0
    copy_beside_link: float = 1.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not 1 <= value < math.inf:
                raise ConfigError(
                    f"slowdown {one.name} is {value}: give how many times as long it takes, 1 or "
                    "more"
                )

    @property
    def any(self) -> bool:
        """Whether something is slowed down."""
        return any(getattr(self, one.name) != 1 for one in fields(self))

    def factors(self) -> Floats:
        """Return the factor of each resource (row) beside each other (column)."""
        return np.array(
            [
                [
                    1.0
                    if own is other
                    else getattr(self, f"{own.name}_beside_{other.name}".lower())
                    for other in Resource
                ]
                for own in Resource
            ]
        )


@dataclass(frozen=True)
class Task:
    """One task; ``after`` are numbers of earlier tasks that must have ended on the same rank."""

    name: str
    resource: Resource
    seconds: Floats
    after: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """When tasks ran.

    Attributes:
        tasks: all of them.
        starts, ends: seconds from the beginning, by task and rank.
    """

    tasks: tuple[Task, ...]
    starts: Floats
    ends: Floats

    @property
    def seconds(self) -> float:
        """Until the last rank has ended."""
        return float(self.ends.max(initial=0.0))

    def busy(self, resource: Resource) -> Floats:
        """Return the seconds that each rank's ``resource`` works; what waits does not."""
        mine = [number for number, task in enumerate(self.tasks) if task.resource is resource]
        found: Floats = (self.ends[mine] - self.starts[mine]).sum(axis=0)
        return found


class Program:
    """Tasks of all ranks.

    Args:
        ranks: how many there are.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ConfigError(f"{ranks} ranks run nothing: there must be at least 1")
        self.ranks = ranks
        self._tasks: list[Task] = []

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
            seconds: it takes alone, on all ranks or on each.
            after: numbers of tasks that must have ended before.

        Raises:
            ConfigError: the seconds are negative, not finite or not as many as ranks, or a task
                that it shall wait for does not exist yet.
        """
        own = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (self.ranks,))
        if not (np.isfinite(own).all() and (own >= 0).all()):
            raise ConfigError(f"task {name!r} takes {seconds} s: seconds are 0 or more, and finite")
        number = len(self._tasks)
        if any(not 0 <= other < number for other in after):
            raise ConfigError(f"task {name!r} is number {number} and waits for {tuple(after)}")
        if resource is Resource.LINK:
            own = np.full(self.ranks, own.max())
        self._tasks.append(Task(name, resource, own, tuple(dict.fromkeys(after))))
        return number

    def run(self, slowdown: Slowdown | None = None) -> Timeline:
        """Return when each task runs, had nothing run before; see [Note: side by side]."""
        tasks = tuple(self._tasks)
        if slowdown is not None and slowdown.any:
            starts, ends = _Fluid(tasks, self.ranks, slowdown.factors()).run()
        else:
            starts, ends = _straight(tasks, self.ranks)
        return Timeline(tasks, starts, ends)


def _straight(tasks: Sequence[Task], ranks: int) -> tuple[Floats, Floats]:
    """Return starts and ends where nothing slows anything down."""
    starts, ends = np.zeros((len(tasks), ranks)), np.zeros((len(tasks), ranks))
    free = {resource: np.zeros(ranks) for resource in Resource}
    for number, task in enumerate(tasks):
        start = free[task.resource]
        for other in task.after:
            start = np.maximum(start, ends[other])
        if task.resource is Resource.LINK:
            start = np.full(ranks, start.max())
        starts[number] = start
        ends[number] = free[task.resource] = start + task.seconds
    return starts, ends


class _Fluid:
    """From event to event, at rates that depend on what runs beside."""

    def __init__(self, tasks: Sequence[Task], ranks: int, factors: Floats) -> None:
        self._tasks, self._ranks, self._factors = tasks, ranks, factors
        # Behind the last task of each resource stands one that is never ready.
        none = len(tasks)
        queues = [[n for n, t in enumerate(tasks) if t.resource is r] + [none] for r in Resource]
        longest = max(map(len, queues))
        self._queues = np.array([q + [none] * (longest - len(q)) for q in queues])
        self._place = np.zeros((len(Resource), ranks), dtype=np.intp)
        self._left = np.full((len(Resource), ranks), np.inf)  # idle: infinite
        waits = [len(task.after) for task in tasks] + [1]
        self._unmet: NDArray[Any] = np.repeat(np.array(waits)[:, None], ranks, axis=1)
        self._then: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for other in task.after:
                self._then[other].append(number)
        self._seconds = np.array([task.seconds for task in tasks]).reshape(len(tasks), ranks)
        self.starts, self.ends = np.zeros((none, ranks)), np.zeros((none, ranks))

    def run(self) -> tuple[Floats, Floats]:
        now = 0.0
        while True:
            while self._start(now):
                self._end(now, np.isfinite(self._left) & (self._left <= 0))
            running = np.isfinite(self._left)
            if not running.any():
                return self.starts, self.ends
            needed = np.where(running, self._left * self._slowed(running), np.inf)
            wait = needed.min()
            now += wait
            ended = running & (needed <= wait * (1 + _SAME))
            self._left = np.where(running, self._left * (1 - wait / needed), np.inf)
            self._end(now, ended)

    def _slowed(self, running: NDArray[np.bool_]) -> Floats:
        """Return how many times as long each running task takes now."""
        slowed = np.ones(running.shape)
        for own in Resource:
            for other in Resource:
                factor = self._factors[own.value, other.value]
                slowed[own.value] *= np.where(running[other.value], factor, 1.0)
        link = Resource.LINK.value
        if running[link].any():
            slowed[link] = slowed[link].max()
        return slowed

    def _start(self, now: float) -> bool:
        """Start what can start, and return whether anything did."""
        begun = False
        every = np.arange(self._ranks)
        for resource in Resource:
            row = resource.value
            heads = self._queues[row, self._place[row]]
            ready = np.isinf(self._left[row]) & (self._unmet[heads, every] == 0)
            if resource is Resource.LINK and not ready.all():
                continue
            at = np.flatnonzero(ready)
            if at.size:
                begun = True
                self._left[row, at] = self._seconds[heads[at], at]
                self.starts[heads[at], at] = now
        return begun

    def _end(self, now: float, ended: NDArray[np.bool_]) -> None:
        for row, rank in zip(*np.nonzero(ended), strict=True):
            task = self._queues[row, self._place[row, rank]]
            self.ends[task, rank] = now
            self._place[row, rank] += 1
            self._left[row, rank] = np.inf
            for other in self._then[task]:
                self._unmet[other, rank] -= 1
