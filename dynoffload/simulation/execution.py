"""Simulates recorded steps on a machine, operator by operator: planned or on demand.

Plans come from the runtime's planner. A region is dirty after a use that writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynoffload.errors import BudgetError
from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Use, infeasible
from dynoffload.simulation.fast_memory import FastMemory, State, StepResult
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.workload import Step, Workload, persistent_part


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated run.

    Attributes:
        steps: result of each step, up to the first infeasible one.
        infeasible: why a step was infeasible; "" if none was.
    """

    steps: tuple[StepResult, ...]
    infeasible: str = ""


def simulate(workload: Workload, machine: Machine, *, planned: bool) -> Simulation:
    """Run ``workload`` on ``machine``; persistent regions start in the tier below.

    Args:
        workload: recorded steps.
        machine: the machine; a budget too small for a step is reported in
            `Simulation.infeasible`, not adjusted.
        planned: whether each step and the next are known, so that the planner evicts by Belady's
            rule and prefetches. Otherwise fetches are on demand and eviction is LRU.
    """
    results: list[StepResult] = []
    execution = Execution(list(workload.sizes), machine)
    execution.place(workload.persistent)
    try:
        for number, step in enumerate(workload.steps):
            execution.resize([step.sizes.get(r, nbytes) for r, nbytes in enumerate(workload.sizes)])
            execution.place(step.given)
            known = workload.steps[number : number + 2]
            plan = _planned(execution, known) if planned else PlanCursor()
            results.append(execution.step(step.uses, plan))
    except BudgetError as error:
        return Simulation(tuple(results), str(error))
    return Simulation(tuple(results))


def _planned(execution: Execution, steps: Sequence[Step]) -> PlanCursor:
    """Return a plan for the first of ``steps`` from the current state of ``execution``.

    Of later steps only persistent regions count, so that those used first stay resident.
    """
    here, *following = steps
    uses = [*here.uses, *(persistent_part(use, step) for step in following for use in step.uses)]
    resident = execution.resident()
    dirty = [region for region in resident if execution.dirty[region]]
    capacity = execution.machine.fast_bytes
    schedule = LookAhead().plan(uses, execution.sizes, capacity, resident, dirty)
    return PlanCursor(uses, schedule.actions)


class Execution(FastMemory):
    """Executes steps given as strings of uses."""

    def resize(self, sizes: Sequence[int]) -> None:
        """Between steps, set the sizes of absent regions to those of the next step."""
        for region, nbytes in enumerate(sizes):
            if self.sizes[region] != nbytes:
                assert self.state[region] is State.ABSENT
                self.sizes[region] = nbytes

    def step(self, uses: Sequence[Use], plan: PlanCursor | None = None) -> StepResult:
        """Execute ``uses`` in order, following ``plan``; without one everything is on demand.

        Raises:
            BudgetError: a use does not fit in ``machine.fast_bytes``.
        """
        began, result = self.now, self.begin_step()
        self._follow(plan or PlanCursor())
        for position, use in enumerate(uses):
            self._advance(position)
            self._make(position, use)
        for region in {region for use in uses for region in use.creates}:
            self._forget(region)
        result.seconds = self.now - began
        return result

    def _make(self, position: int, use: Use) -> None:
        regions = list(dict.fromkeys((*use.regions, *use.creates)))
        need = sum(self.sizes[region] for region in regions)
        if need > self.machine.fast_bytes:
            raise infeasible(position, need, self.machine.fast_bytes)
        for region in use.creates:
            self._copied[region] = False
        self._pin(regions)
        for region in regions:
            self._result.faults += self.state[region] is State.ABSENT and self._copied[region]
        self._fetch(regions, position)
        seconds = use.seconds / self.machine.compute
        self._compute(seconds)
        self._result.compute_s += seconds
        for region in (*use.writes, *use.creates):
            self.dirty[region] = True
        for region in regions:
            self._wanted[region] = False
            self._renew(region)
        self._pin(regions, -1)
        for region in use.frees:
            self._forget(region)
