"""The policies that a simulation compares, and `simulate`, a workload on a machine under one.

Where a string is known, the planners of `dynoffload.planning` plan it, the same that the runtime
uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dynoffload.errors import BudgetError
from dynoffload.planning.lookahead import LookAhead
from dynoffload.simulation.execution import Execution, Plan
from dynoffload.simulation.fast_memory import StepResult
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.workload import Step, Workload, persistent_part


@dataclass
class Strategy:
    """A policy over a run of steps; by itself, everything is on demand and the oldest leaves.

    Attributes:
        name: in tables.
    """

    name: str = "on-demand"

    def shaped(self, workload: Workload, machine: Machine) -> Shaped:
        """Return the workload as the policy moves it."""
        sizes = []
        for step in workload.steps:
            own = list(workload.sizes)
            for region, nbytes in step.sizes.items():
                own[region] = nbytes
            sizes.append(own)
        return Shaped(workload.steps, sizes, workload.persistent)

    def begin(self, workload: Workload, machine: Machine) -> None:
        """The run begins.

        Raises:
            BudgetError: the policy cannot run the workload in ``machine.fast_bytes``.
        """

    def execution(self, sizes: list[int], machine: Machine) -> Execution:
        """Return what the steps run on."""
        return Execution(sizes, machine)

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """Return what to expect and to do in step ``number``; None: everything on demand."""
        return None

    def observe(self, step: Step, result: StepResult) -> None:
        """The step ran, and cost this."""


@dataclass(frozen=True)
class Shaped:
    """A workload as a policy moves it.

    Attributes:
        steps: in order.
        sizes: bytes of each region, step by step.
        persistent: regions that are there before the first step.
    """

    steps: Sequence[Step]
    sizes: Sequence[list[int]]
    persistent: Sequence[int]


@dataclass
class Clairvoyant(Strategy):
    """Knows every step, and the one after it: Belady's rule, fetched as early as there is room."""

    name: str = "clairvoyant"
    _steps: Sequence[Step] = ()

    def begin(self, workload: Workload, machine: Machine) -> None:
        """See `Strategy.begin`."""
        self._steps = workload.steps

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        here = self._steps[number]
        if number + 1 == len(self._steps):
            return planned(here, execution)
        # Of the next step, only what is there before it counts: what comes first should stay.
        following = self._steps[number + 1]
        joined = Step(
            uses=(*here.uses, *(persistent_part(use, following) for use in following.uses)),
            keys=(*here.keys, *(("next", key) for key in following.keys)),
            sizes=here.sizes,
            phases=here.phases,
            given=here.given,
        )
        return planned(joined, execution)


def planned(step: Step, execution: Execution, *, strict: bool = False) -> Plan:
    """Return a plan for ``step`` from where ``execution`` stands."""
    resident = execution.resident()
    dirty = [region for region in resident if execution.dirty[region]]
    capacity = execution.machine.fast_bytes
    schedule = LookAhead().plan(step.uses, execution.sizes, capacity, resident, dirty)
    return Plan(step.keys, step.uses, schedule, strict=strict)


@dataclass(frozen=True)
class Simulation:
    """What a run cost.

    Attributes:
        steps: what each cost, up to the first that could not be made.
        infeasible: why a step, or the run, could not be made; "" if all were.
    """

    steps: tuple[StepResult, ...]
    infeasible: str = ""

    def seconds(self, warmup: int = 1) -> float:
        """Return the median seconds of a step after the first ``warmup``."""
        return median(step.seconds for step in self.steps[warmup:])


def simulate(workload: Workload, machine: Machine, strategy: Strategy) -> Simulation:
    """Run ``workload`` on ``machine`` under ``strategy``.

    What is there before the first step lies in the tier below. A budget that a policy cannot run
    under is reported, never clipped: see `Simulation.infeasible`.
    """
    shaped = strategy.shaped(workload, machine)
    results: list[StepResult] = []
    infeasible = ""
    try:
        strategy.begin(workload, machine)
        execution = strategy.execution(list(shaped.sizes[0] if shaped.sizes else ()), machine)
        execution.place(shaped.persistent)
        for number, step in enumerate(shaped.steps):
            execution.resize(shaped.sizes[number])
            execution.place(step.given)
            plan = strategy.plan(number, execution)
            result = execution.step(step.uses, step.keys, plan)
            strategy.observe(step, result)
            results.append(result)
    except BudgetError as error:
        infeasible = str(error)
    return Simulation(tuple(results), infeasible)
