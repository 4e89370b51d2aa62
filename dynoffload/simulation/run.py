"""`simulate`: a workload on a machine under a policy, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from dynoffload.errors import BudgetError
from dynoffload.simulation.execution import Execution, Span, StepResult
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.policies import Strategy
from dynoffload.simulation.workload import Step, Workload, paged


@dataclass(frozen=True)
class Simulation:
    """What a run cost.

    Attributes:
        policy: its name.
        machine: it ran on.
        steps: what each cost, up to the first that could not be made.
        infeasible: why a step, or the run, could not be made; "" if all were.
        spans: of the timeline, if they were asked for.
    """

    policy: str
    machine: Machine
    steps: tuple[StepResult, ...]
    infeasible: str = ""
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def feasible(self) -> bool:
        """Whether all steps could be made."""
        return not self.infeasible

    def seconds(self, warmup: int = 1) -> float:
        """Return the median seconds of a step after the first ``warmup``."""
        return median(step.seconds for step in self.steps[warmup:])


def simulate(
    workload: Workload, machine: Machine, strategy: Strategy, *, record: bool = False
) -> Simulation:
    """Run ``workload`` on ``machine`` under ``strategy``.

    What is there before the first step lies in the tier below. A budget that a policy cannot run
    under is reported, never clipped: see `Simulation.infeasible`.
    """
    steps, sizes, there = _shaped(workload, machine, strategy)
    results: list[StepResult] = []
    infeasible = ""
    execution = Execution(list(sizes[0] if sizes else ()), machine, record=record)
    try:
        execution.victims = strategy.begin(workload, machine)
        execution.drops = strategy.drops
        execution.place(there, below=True)
        for number, step in enumerate(steps):
            execution.resize(sizes[number])
            execution.place(step.given, below=True)
            plan = strategy.plan(number, execution)
            result = execution.step(step.uses, step.keys, plan)
            strategy.observe(step, result)
            results.append(result)
    except BudgetError as error:
        infeasible = str(error)
    return Simulation(strategy.name, machine, tuple(results), infeasible, tuple(execution.spans))


def _shaped(
    workload: Workload, machine: Machine, strategy: Strategy
) -> tuple[list[Step], list[list[int]], list[int]]:
    """Return the steps, the sizes in each, and what is there before, in regions or in pages."""
    if not strategy.by_pages:
        sizes = []
        for step in workload.steps:
            own = list(workload.sizes)
            for region, nbytes in step.sizes.items():
                own[region] = nbytes
            sizes.append(own)
        return workload.steps, sizes, workload.persistent
    # Pages are numbered by the largest size of each region, so that they are the same in all steps.
    split = [paged(step, workload.sizes, machine.page_bytes) for step in workload.steps]
    first, there = 0, list[int]()
    for region, nbytes in enumerate(workload.sizes):
        count = max(1, -(-nbytes // machine.page_bytes))
        if region in set(workload.persistent):
            there += range(first, first + count)
        first += count
    return [step for step, _ in split], [pages for _, pages in split], there
