"""Policies that make regions again: DTR, online by a heuristic, and Capuchin, planned by cost.

Sources: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021); Capuchin (Peng et al.,
ASPLOS 2020). Both know operators and tensors, so they should be given a workload of operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynoffload.errors import BudgetError
from dynoffload.planning.schedule import Action, Kind, NextUse, Schedule, Use
from dynoffload.simulation.execution import Execution, StepResult, Victims
from dynoffload.simulation.following import Plan
from dynoffload.simulation.machine import Link, Machine
from dynoffload.simulation.policies import Strategy
from dynoffload.simulation.workload import Step, Workload
from dynoffload.units import format_bytes


class Rematerialization:
    """DTR's heuristic: drop what is cheap to make again, large, and long unused.

    The score of a region is cost / (bytes * staleness), the lowest leaves first. Its cost is that
    of the use that made it and of all dropped regions that would have to be made with it: dropped
    ancestors, and dropped descendants that would need it (`h_DTR` with the exact neighbourhood).
    What no use of the step has made, such as parameters, cannot be dropped, and stays.
    """

    def choose(self, execution: Execution) -> tuple[int, bool] | None:
        """See `Victims.choose`."""
        least = []  # of each, what its score is without its neighbourhood
        for region in execution.evictable():
            size = execution.sizes[region]
            if region not in execution.producer or not size:
                continue
            stale = max(execution.now - execution.last_used[region], 1e-9)
            least.append((execution.cost(region) / (size * stale), region, size * stale))
        best, lowest = -1, math.inf
        for alone, region, weight in sorted(least):
            if alone > lowest:
                break  # nor will those after it be lower
            own = execution.cost(region)
            score = (own + self._beside(region, execution, lowest * weight - own)) / weight
            if (score, region) < (lowest, best):
                best, lowest = region, score
        return None if best < 0 else (best, True)

    def _beside(self, region: int, execution: Execution, most: float) -> float:
        """Return the seconds of the dropped neighbourhood of ``region``; or, once they are more
        than ``most``, of a part of it."""
        total = 0.0
        seen = {region}
        # What it would have to be made from, then what would have to be made with it.
        for neighbours in (execution.sources, execution.made_from):
            ahead = [other for other in neighbours(region) if execution.dropped[other]]
            while ahead:
                other = ahead.pop()
                if other not in seen:
                    seen.add(other)
                    total += execution.cost(other)
                    if total > most:
                        return total
                    ahead += [one for one in neighbours(other) if execution.dropped[one]]
        return total


@dataclass
class DTR(Strategy):
    """Recomputes activations, and moves nothing: parameters, gradients and state must fit."""

    name: str = "DTR"
    drops: bool = True

    def begin(self, workload: Workload, machine: Machine) -> Victims | None:
        """See `Strategy.begin`."""
        held = sum(workload.sizes[region] for region in workload.persistent)
        if held > machine.fast_bytes:
            raise BudgetError(
                f"recomputation alone cannot run this: parameters, buffers and optimizer state are "
                f"{format_bytes(held)}, and there are {format_bytes(machine.fast_bytes)}; raise "
                "the budget to more than that"
            )
        return Rematerialization()


class _Gap(NamedTuple):
    """A stretch between two uses of a region in which it need not be here."""

    region: int
    begin: int  # position of the use before
    end: int  # position of the use after
    free_s: float  # what is left of it after moving the region out and in


@dataclass
class Capuchin(Strategy):
    """Swap or recompute, decided on a measured step.

    Out of the peak that does not fit, first those regions are swapped whose way out and in their
    gap hides, the longest first; then, one by one, swapped or dropped, whichever costs less time.
    A swap in begins at the use before it that is just early enough.
    """

    name: str = "swap or recompute"
    drops: bool = True
    _machine: Machine | None = None
    _last: Step | None = None
    _sizes: list[int] = field(default_factory=list, repr=False)

    def begin(self, workload: Workload, machine: Machine) -> Victims | None:
        """See `Strategy.begin`."""
        self._machine = machine
        return None

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        assert self._machine is not None
        if self._last is None:
            return None
        return plan_of(self._last, execution.sizes, self._machine)

    def observe(self, step: Step, result: StepResult) -> None:
        """See `Strategy.observe`."""
        self._last = step


def plan_of(step: Step, sizes: Sequence[int], machine: Machine) -> Plan:
    """Return Capuchin's plan for ``step``."""
    times, ends = _times(step.uses, machine)
    excess = _excess(step, sizes, machine.fast_bytes)
    gaps = _gaps(step, sizes, times, ends, machine.link)
    producers = {region: p for p, use in enumerate(step.uses) for region in use.creates}
    actions: list[Action] = []
    drops: list[tuple[int, int]] = []
    for gap in sorted(gaps, key=lambda gap: -gap.free_s):
        inside = range(gap.begin + 1, gap.end)
        if not any(excess[p] > 0 for p in inside):
            continue
        made = producers.get(gap.region)
        again = step.uses[made].seconds / machine.compute if made is not None else math.inf
        if gap.free_s < 0 and again < -gap.free_s:
            drops.append((gap.begin + 1, gap.region))
        else:
            actions.append(Action(gap.begin + 1, Kind.EVICT, gap.region))
            due = times[gap.end] - sizes[gap.region] / machine.link.read_bps
            trigger = gap.begin + 1
            while trigger < gap.end and ends[trigger] <= due:
                trigger += 1
            actions.append(Action(trigger, Kind.FETCH, gap.region))
        for position in inside:
            excess[position] -= sizes[gap.region]
    actions.sort(key=lambda action: (action.position, action.kind is Kind.FETCH))
    schedule = Schedule(tuple(actions), 0, 0, 0, NextUse(step.uses))
    return Plan(step.keys, step.uses, schedule, tuple(sorted(drops)))


def _times(uses: Sequence[Use], machine: Machine) -> tuple[list[float], list[float]]:
    """Return when each use begins and ends if none waits."""
    begins, ends, now = [], [], 0.0
    for use in uses:
        begins.append(now)
        now += use.seconds / machine.compute
        ends.append(now)
    return begins, ends


def _excess(step: Step, sizes: Sequence[int], capacity: int) -> list[int]:
    """Return by how many bytes each use passes the capacity, were nothing moved."""
    used = {region for use in step.uses for region in (*use.regions, *use.creates)}
    created = {region for use in step.uses for region in use.creates}
    alive = sum(sizes[region] for region in used - created)
    excess = []
    for use in step.uses:
        alive += sum(sizes[region] for region in use.creates)
        excess.append(alive - capacity)
        alive -= sum(sizes[region] for region in use.frees)
    return excess


def _gaps(
    step: Step, sizes: Sequence[int], times: Sequence[float], ends: Sequence[float], link: Link
) -> list[_Gap]:
    gaps = []
    last: dict[int, int] = {}
    for position, use in enumerate(step.uses):
        for region in {*use.regions, *use.creates}:
            before = last.get(region)
            if before is not None and position - before > 1 and region not in use.creates:
                moving = sizes[region] / link.read_bps + sizes[region] / link.write_bps
                free = times[position] - ends[before] - moving
                gaps.append(_Gap(region, before, position, free))
            last[region] = position
    return gaps
