"""The policies that a simulation compares: who is fetched ahead, and who leaves.

What it is: `Strategy`, what `dynoffload.simulation.simulate` asks a policy step by step, and the
policies that move regions only: on demand, by pages, replay, prediction, clairvoyance. Those that
make regions again, or move by intervals, stand in `recompute` and `intervals`. What it is not: a
planner; where a string is known or predicted, the planners of `dynoffload.planning` plan it, the
same that the runtime uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Policy
from dynoffload.simulation.execution import Execution, StepResult, Victims
from dynoffload.simulation.following import Plan
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.workload import Step, Workload, persistent_part


@dataclass
class Strategy:
    """A policy over a run of steps; by itself, everything is on demand and the oldest leaves.

    Attributes:
        name: in tables.
        by_pages: whether it moves pages of ``machine.page_bytes`` rather than regions.
        drops: whether it makes regions again rather than move them.
    """

    name: str = "on-demand"
    by_pages: bool = False
    drops: bool = False

    def begin(self, workload: Workload, machine: Machine) -> Victims | None:
        """The run begins; return who chooses what leaves, or None for the last used by plan.

        Raises:
            BudgetError: the policy cannot run the workload in ``machine.fast_bytes``.
        """
        return None

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """Return what to expect and to do in step ``number``; None: everything on demand."""
        return None

    def observe(self, step: Step, result: StepResult) -> None:
        """The step ran, and cost this."""


def schedule_of(step: Step, execution: Execution, policy: Policy, *, strict: bool = False) -> Plan:
    """Return a plan for ``step`` from where ``execution`` stands."""
    resident = execution.resident()
    dirty = [region for region in resident if execution.dirty[region]]
    capacity = execution.machine.fast_bytes
    schedule = policy.plan(step.uses, execution.sizes, capacity, resident, dirty)
    return Plan(step.keys, step.uses, schedule, strict=strict)


@dataclass
class UnifiedMemory(Strategy):
    """Paging in hardware, as by unified virtual memory: by pages, on demand, the oldest leaves.

    Each page that an operator waits for costs the link's ``fault_s``. Read-ahead is the page: a
    fault on 4 KiB brings all ``machine.page_bytes`` around it.
    """

    name: str = "unified memory"
    by_pages: bool = True


@dataclass
class Replay(Strategy):
    """Prefetch by the order that the last step recorded, as ZeRO-Infinity's engine does.

    The first operator out of order ends the prefetch of the step; the next step runs without one
    and is recorded anew (Rajbhandari et al., SC 2021, and its implementation in DeepSpeed).
    """

    name: str = "replay"
    policy: Policy = field(default_factory=LookAhead)
    _last: Step | None = None

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        if self._last is None:
            return None
        return schedule_of(self._last, execution, self.policy, strict=True)

    def observe(self, step: Step, result: StepResult) -> None:
        """See `Strategy.observe`."""
        self._last = None if result.broken else step


@dataclass
class Predicted(Strategy):
    """Prefetch by what somebody expects of each step; what comes otherwise is found again.

    Attributes:
        expect: step number -> the step that is expected, None for no idea.
    """

    name: str = "pilot"
    expect: Callable[[int], Step | None] = lambda number: None
    policy: Policy = field(default_factory=LookAhead)

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        expected = self.expect(number)
        return None if expected is None else schedule_of(expected, execution, self.policy)


@dataclass
class Clairvoyant(Strategy):
    """Knows every step, and the one after it: Belady's rule, fetched as early as there is room."""

    name: str = "clairvoyant"
    policy: Policy = field(default_factory=LookAhead)
    _steps: Sequence[Step] = ()

    def begin(self, workload: Workload, machine: Machine) -> Victims | None:
        """See `Strategy.begin`."""
        self._steps = workload.steps
        return None

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        here = self._steps[number]
        if number + 1 == len(self._steps):
            return schedule_of(here, execution, self.policy)
        # Of the next step, only what is there before it counts: what comes first should stay.
        following = self._steps[number + 1]
        joined = Step(
            uses=(*here.uses, *(persistent_part(use, following) for use in following.uses)),
            keys=(*here.keys, *(("next", key) for key in following.keys)),
            sizes=here.sizes,
            phases=here.phases,
            given=here.given,
        )
        return schedule_of(joined, execution, self.policy)
