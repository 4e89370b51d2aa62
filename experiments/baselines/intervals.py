"""A static plan by intervals: while one runs, what the next one needs is brought.

Source: Sentinel (Ren et al., HPCA 2021). Of its ideas these are here: regions are told apart by
lifetime, those that live within one interval are never moved and have a reserve of their own; what
lives longer moves once per interval, ahead of the one that uses it; and the length of the interval
is chosen so that what two intervals need fits beside the reserve, and least transfer is exposed.
Its co-allocation of pages is not: regions are moved whole here. The plan is made of one recorded
step and kept, so a network that takes another path misses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynoffload.errors import BudgetError
from dynoffload.planning.schedule import Action, Kind, Schedule
from dynoffload.simulation.execution import Execution, Plan
from dynoffload.simulation.fast_memory import StepResult
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.policies import Strategy
from dynoffload.simulation.workload import Step, Workload
from dynoffload.units import format_bytes

_LENGTHS = 24  # how many lengths of an interval are tried, evenly in ratio


@dataclass(frozen=True)
class Interval:
    """A stretch of a step.

    Attributes:
        start: position of its first use.
        stop: one past its last.
        long: regions it uses that are alive before or after it.
        short_bytes: most bytes alive at once of those that are not.
        seconds: of its uses.
    """

    start: int
    stop: int
    long: frozenset[int]
    short_bytes: int
    seconds: float


@dataclass
class Intervals(Strategy):
    """Sentinel's way: one static plan, made of the first step.

    Attributes:
        length: uses in an interval; chosen when the first step has run.
    """

    name: str = "intervals"
    length: int = 0
    _machine: Machine | None = None
    _plan: Plan | None = field(default=None, repr=False)
    _sizes: list[int] = field(default_factory=list, repr=False)

    def begin(self, workload: Workload, machine: Machine) -> None:
        """See `Strategy.begin`."""
        self._machine = machine

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        self._sizes = execution.sizes
        return self._plan

    def observe(self, step: Step, result: StepResult) -> None:
        """See `Strategy.observe`."""
        assert self._machine is not None
        if self._plan is None:
            self.length, intervals = best_length(step, self._sizes, self._machine)
            self._plan = plan_of(step, intervals)


def best_length(
    step: Step, sizes: Sequence[int], machine: Machine
) -> tuple[int, Sequence[Interval]]:
    """Return the length of an interval, in uses, that exposes least transfer, and the intervals.

    Raises:
        BudgetError: no length fits.
    """
    best: tuple[float, int, Sequence[Interval]] | None = None
    needs = []
    length = max(1, len(step.uses))
    for _ in range(_LENGTHS):
        intervals = intervals_of(step, sizes, length)
        reserve = max(interval.short_bytes for interval in intervals)
        need = reserve + max(
            _bytes(a.long | b.long, sizes)
            for a, b in zip(intervals, (*intervals[1:], intervals[-1]), strict=True)
        )
        needs.append(need)
        if need <= machine.fast_bytes:
            exposed = _exposed(intervals, sizes, machine)
            if best is None or exposed < best[0]:
                best = exposed, length, intervals
        if length == 1:
            break
        length = max(1, min(length - 1, int(length / 1.6)))
    if best is None:
        raise BudgetError(
            f"no interval fits: the smallest needs {format_bytes(min(needs))} for what it and the "
            f"next use, but there are {format_bytes(machine.fast_bytes)}; raise the budget"
        )
    return best[1], best[2]


def _exposed(intervals: Sequence[Interval], sizes: Sequence[int], machine: Machine) -> float:
    """Return the seconds of transfer that no compute hides."""
    exposed = 0.0
    for here, following in zip(intervals, (*intervals[1:], intervals[0]), strict=True):
        brought = _bytes(following.long - here.long, sizes)
        taken = _bytes(here.long - following.long, sizes)
        reads, writes = machine.link.rates(reads=bool(brought), writes=bool(taken))
        moving = max(brought / reads if brought else 0.0, taken / writes if taken else 0.0)
        exposed += max(0.0, moving - here.seconds / machine.compute)
    return exposed


def intervals_of(step: Step, sizes: Sequence[int], length: int) -> list[Interval]:
    """Cut ``step`` into intervals of ``length`` uses."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, use in enumerate(step.uses):
        for region in {*use.regions, *use.creates}:
            first.setdefault(region, position)
            last[region] = position
    found = []
    for start in range(0, len(step.uses), length):
        stop = min(start + length, len(step.uses))
        short = {
            region
            for position in range(start, stop)
            for region in step.uses[position].creates
            if first[region] >= start and last[region] < stop
        }
        alive = peak = 0
        used: set[int] = set()
        for use in step.uses[start:stop]:
            used.update(use.regions, use.creates)
            alive += sum(sizes[region] for region in use.creates if region in short)
            peak = max(peak, alive)
            alive -= sum(sizes[region] for region in use.frees if region in short)
        seconds = sum(use.seconds for use in step.uses[start:stop])
        found.append(Interval(start, stop, frozenset(used - short), peak, seconds))
    return found


def plan_of(step: Step, intervals: Sequence[Interval]) -> Plan:
    """Return the plan that brings what an interval uses while the one before runs."""
    actions: list[Action] = []
    here: set[int] = set()
    for number, interval in enumerate(intervals):
        following = intervals[number + 1].long if number + 1 < len(intervals) else frozenset()
        wanted = interval.long | following
        actions += [Action(interval.start, Kind.EVICT, region) for region in sorted(here - wanted)]
        for region in _in_order(step, interval, wanted - here, intervals[number + 1 :][:1]):
            actions.append(Action(interval.start, Kind.FETCH, region))
        here = set(wanted)
    schedule = Schedule(tuple(actions))
    return Plan(step.keys, step.uses, schedule)


def _in_order(
    step: Step, interval: Interval, regions: set[int] | frozenset[int], after: Sequence[Interval]
) -> list[int]:
    """Return ``regions`` in the order in which this interval and the next use them."""
    stop = after[0].stop if after else interval.stop
    order = dict.fromkeys(r for use in step.uses[interval.start : stop] for r in use.regions)
    return [region for region in order if region in regions]


def _bytes(regions: frozenset[int], sizes: Sequence[int]) -> int:
    return sum(sizes[region] for region in regions)
