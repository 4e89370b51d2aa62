"""Policies that make regions again: DTR, online by a heuristic, and Capuchin, planned by cost.

Sources: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021); Capuchin (Peng et al.,
ASPLOS 2020). Both know operators and tensors, so they should be given a workload of operators.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dynoffload.errors import BudgetError
from dynoffload.planning.schedule import Action, Kind, Schedule, Use
from dynoffload.simulation.execution import Execution, Plan
from dynoffload.simulation.fast_memory import State, StepResult
from dynoffload.simulation.machine import Link, Machine
from dynoffload.simulation.policies import Strategy
from dynoffload.simulation.workload import Step, Workload
from dynoffload.units import format_bytes

_MOST_RECOMPUTED = 1000  # times as many uses as a step has, after which a policy thrashes


class Victims(Protocol):
    """Chooses what is dropped when room is wanted."""

    def choose(self, execution: Recomputing) -> int | None:
        """Return a region of ``execution.evictable()``; None if nothing may be dropped."""


@dataclass(frozen=True)
class Dropping(Plan):
    """A plan that also drops.

    Attributes:
        drops: (position, region): drop the region once progress has reached the position.
    """

    drops: Sequence[tuple[int, int]] = ()


class Recomputing(Execution):
    """An execution whose regions may be dropped: at its next use, a region is made again by the use
    that created it, with whatever that needs in turn.

    What a step frees is not forgotten, as something dropped may be made from it; it takes no
    memory, but may be made again. What has no creator (inputs) stays to the end of the step.
    Results that a pending recomputation needs are pinned until what needs them is made, so that it
    comes to an end.

    Args:
        victims: chooses what is dropped; None: what is used last by the plan is evicted.

    Attributes:
        dropped: of each region.
        last_used: seconds at which each region was.
    """

    def __init__(self, sizes: list[int], machine: Machine, victims: Victims | None = None) -> None:
        self.victims = victims
        self.dropped: list[bool] = []
        self.last_used: list[float] = []
        self._made_from: dict[int, list[int]] = {}
        self._kept: list[int] = []  # freed inputs, until the step ends
        self._drops: deque[tuple[int, int]] = deque()
        super().__init__(sizes, machine)

    def extend(self) -> None:
        """See `Execution.extend`."""
        super().extend()
        more = len(self.sizes) - len(self.dropped)
        self.dropped += [False] * more
        self.last_used += [-math.inf] * more

    def evictable(self) -> list[int]:
        """Return the regions that may leave now."""
        return [region for region in range(len(self.state)) if self._may_leave(region)]

    def cost(self, region: int) -> float:
        """Return the seconds of the use that created ``region`` in this step; inf without one."""
        use = self.producer.get(region)
        return math.inf if use is None else self._uses[use].seconds / self.machine.compute

    def sources(self, region: int) -> Sequence[int]:
        """Return the regions from which ``region`` was made in this step."""
        use = self.producer.get(region)
        if use is None:
            return ()
        made = self._uses[use]
        return [other for other in made.regions if other not in made.creates]

    def made_from(self, region: int) -> Sequence[int]:
        """Return the regions that this step has made from ``region`` so far."""
        return self._made_from.get(region, ())

    def _expect(self, plan: Plan) -> None:
        super()._expect(plan)
        self._drops = deque(plan.drops if isinstance(plan, Dropping) else ())

    def _anchor(self, key: Hashable, position: int) -> None:
        super()._anchor(key, position)
        while self._drops and self._drops[0][0] <= self._plan.position:
            _, region = self._drops.popleft()
            if self._may_leave(region) and region in self.producer:
                self._drop(region)

    def _create(self, position: int, use: Use) -> None:
        super()._create(position, use)
        for region in use.creates:
            self.dropped[region] = False
            for source in use.regions:
                if source not in use.creates:
                    self._made_from.setdefault(source, []).append(region)

    def _freed(self, region: int) -> None:
        here = self.state[region] is not State.ABSENT
        if region in self.producer:
            if here:
                self._drop(region)
        elif here:
            self._kept.append(region)
        else:
            self._forget(region)

    def _end(self) -> None:
        for region in (*self._kept, *self.producer):  # what was made again may be here still
            self._forget(region)
            self.dropped[region] = False
        self._kept.clear()
        self._made_from.clear()

    def _release(self, regions: Iterable[int], written: Iterable[int]) -> None:
        regions = list(regions)
        for region in regions:
            self.last_used[region] = self.now
        super()._release(regions, written)

    def _make_room(self) -> bool:
        if self.victims is None:
            return super()._make_room()
        chosen = self.victims.choose(self)
        if chosen is None:
            return False
        self._drop(chosen)
        return True

    def _drop(self, region: int) -> None:
        self._forget(region)
        self.dropped[region] = True

    def _get(self, position: int, regions: Sequence[int]) -> None:
        missing = [r for r in regions if self.dropped[r] and self.state[r] is State.ABSENT]
        if missing:
            self._recompute(position, missing, regions)
        super()._get(position, regions)

    def _recompute(self, position: int, missing: Sequence[int], beside: Sequence[int]) -> None:
        """Make ``missing`` again, from what they were made of, and so on."""
        held = [region for region in beside if self.state[region] is State.HERE]
        for region in held:
            self._pins[region] += 1
        made = 0
        for wanted in missing:
            stack: list[tuple[int, list[int]]] = [(wanted, held)]  # with who holds the result
            waits: dict[int, list[int]] = {}  # region -> what was made for it
            while stack:
                region, holder = stack[-1]
                if self.state[region] is State.HERE:
                    stack.pop()
                    continue
                sources = self.sources(region)
                own = waits.setdefault(region, [])
                gone = [r for r in sources if self.dropped[r] and self.state[r] is State.ABSENT]
                if gone:  # the latest first: it needs most room on its way
                    gone.sort(key=lambda source: self.producer[source])
                    stack += [(source, own) for source in gone]
                    continue
                made += 1
                if made > _MOST_RECOMPUTED * len(self._uses):
                    raise BudgetError(
                        f"use {position} of the step does not come to an end: what it needs is "
                        "dropped again as fast as it is made; raise the budget"
                    )
                self._again(position, region, sources)
                self._release(waits.pop(region), ())
                self._pins[region] += 1
                holder.append(region)
                stack.pop()
        self._release(held, ())

    def _again(self, position: int, region: int, sources: Sequence[int]) -> None:
        """Make ``region`` from ``sources``, none of which is dropped."""
        self._copied[region] = False
        self.dropped[region] = False
        super()._get(position, [*sources, region])
        for source in (*sources, region):
            self._pins[source] += 1
        seconds = self.cost(region)
        self._compute(seconds)
        self._result.recompute_s += seconds
        self._release((*sources, region), (region,))


class Rematerialization:
    """DTR's heuristic: drop what is cheap to make again, large, and long unused.

    The score of a region is cost / (bytes * staleness), the lowest leaves first. Its cost is that
    of the use that made it and of all dropped regions that would have to be made with it: dropped
    ancestors, and dropped descendants that would need it (`h_DTR` with the exact neighbourhood).
    What no use of the step has made, such as parameters, cannot be dropped, and stays.
    """

    def choose(self, execution: Recomputing) -> int | None:
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
        return None if best < 0 else best

    def _beside(self, region: int, execution: Recomputing, most: float) -> float:
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

    def begin(self, workload: Workload, machine: Machine) -> None:
        """See `Strategy.begin`."""
        held = sum(workload.sizes[region] for region in workload.persistent)
        if held > machine.fast_bytes:
            raise BudgetError(
                f"recomputation alone cannot run this: parameters, buffers and optimizer state are "
                f"{format_bytes(held)}, and there are {format_bytes(machine.fast_bytes)}; raise "
                "the budget to more than that"
            )

    def execution(self, sizes: list[int], machine: Machine) -> Execution:
        """See `Strategy.execution`."""
        return Recomputing(sizes, machine, Rematerialization())


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
    _last: Step | None = None

    def execution(self, sizes: list[int], machine: Machine) -> Execution:
        """See `Strategy.execution`."""
        return Recomputing(sizes, machine)

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        if self._last is None:
            return None
        return plan_of(self._last, execution.sizes, execution.machine)

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
    schedule = Schedule(tuple(actions))
    return Dropping(step.keys, step.uses, schedule, drops=tuple(sorted(drops)))


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
