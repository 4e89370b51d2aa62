"""The policies whose step times are compared, and each one simulated.

`POLICIES` says what of each there is to measure and to simulate, and `simulated` is the second side
of the comparison; the first stands in `dynoffload.experiments.step_time_runs`.

[Note: two simulations]  What the runtime does by a plan or on demand is simulated as it does it
(`dynoffload.simulation.Training`): by regions of whole pages, with its own work. Clairvoyance is
the same runtime, told every step. The other policies are simulated operator by operator
(`dynoffload.simulation.simulate`), on the same link and with the same seconds of plain steps,
tensor by tensor, with nothing of what a runtime of theirs would take itself. The two are not
ranked together.

[Note: pages]  Paging by the system has unified memory for its simulation: by pages of `PAGE_BYTES`,
which is what a driver of unified memory moves at the least, each for `FAULT_S` and without any
other latency. The system moves what it reads ahead, which may be less, and counts operators'
temporaries, too.

[Note: no end]  A rule that makes again what it has just dropped comes to no end. So a simulated
policy is stopped as a measured one is, when a step takes so many times what a plain one takes; and
when simulating it has taken `PATIENCE_S`, which is said then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from dynoffload.errors import ConfigError, DynOffloadError
from dynoffload.experiments import simulation_fit
from dynoffload.experiments.baselines import DTR as DTR_RUN
from dynoffload.experiments.baselines import REPLAY
from dynoffload.experiments.baselines.intervals import Intervals
from dynoffload.experiments.baselines.recomputing import DTR, Capuchin, Recomputing, Victims
from dynoffload.experiments.baselines.simulated import Replay, UnifiedMemory
from dynoffload.experiments.simulation_fit import Fit, Material
from dynoffload.profiler.trace import Phase, Trace
from dynoffload.runtime.opening import IO_THREADS
from dynoffload.simulation import Machine, Strategy, Workload, simulate, workload
from dynoffload.simulation.execution import Execution, StepResult
from dynoffload.simulation.following import Plan
from dynoffload.simulation.policies import Shaped
from dynoffload.simulation.workload import Step
from dynoffload.units import KiB, format_seconds

PAGE_BYTES = 64 * KiB
FAULT_S = 3e-5
"""Of a fault of unified memory: 20 to 50 microseconds are published for its service."""
STOPPED = ": stopped"
"""Ends the reason of what was given up."""
PATIENCE_S = 10.0
"""Of one simulation, see [Note: no end]."""
PILOT = "pilot"
BOUND = "clairvoyant"
"""The runtime, told every step: what a prediction could reach, and none of them."""
SYSTEM = "os-paging"
PUBLISHED = (SYSTEM, DTR_RUN)
"""Those that the published figure is over; unified memory's place has paging by the system."""


@dataclass(frozen=True)
class Policy:
    """One policy.

    Attributes:
        title: in tables.
        strategy: simulates it operator by operator; None: the runtime is simulated.
        runs: whether it can be measured: as `OffloadConfig.policy`, as a baseline of that name, or,
            `SYSTEM`, as plain training in a memory group with swap.
    """

    title: str
    strategy: Callable[[], Strategy] | None = None
    runs: bool = True


POLICIES: dict[str, Policy] = {
    PILOT: Policy("pilot"),
    "repeat": Policy("last order"),
    REPLAY: Policy("recorded order, strict", Replay),
    "on-demand": Policy("on demand"),
    DTR_RUN: Policy("rematerialisation (DTR)", DTR),
    SYSTEM: Policy("paging by the system", partial(UnifiedMemory, page_bytes=PAGE_BYTES)),
    "intervals": Policy("intervals (Sentinel)", Intervals, runs=False),
    "capuchin": Policy("swap or recompute (Capuchin)", Capuchin, runs=False),
    BOUND: Policy("clairvoyant", runs=False),
}
"""By the name that ``--policies`` takes."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a policy under a budget, measured or simulated.

    Attributes:
        why: it has no time; "" if it has, or if there is no such side.
        steps_s: seconds of the steps that count.
        bytes_in: read from the tier below, per step.
        bytes_out: written to it.
        note: what is to be known of it.
    """

    why: str = ""
    steps_s: tuple[float, ...] = ()
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """The median of a step."""
        return median(self.steps_s) if self.steps_s and not self.why else None


class NoEndError(DynOffloadError, RuntimeError):
    """A simulated policy was stopped; see [Note: no end]."""


@dataclass
class Watched(Strategy):
    """A strategy that is stopped; see [Note: no end].

    Attributes:
        inner: does the work.
        slowest_s: of a step, on the simulated clock.
        patience_s: of all, on the real one.
    """

    inner: Strategy = field(default_factory=Strategy)
    slowest_s: float = math.inf
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        self.name = self.inner.name
        self._until = time.monotonic() + self.patience_s
        self._began = 0.0
        self._victims: Victims | None = None

    def shaped(self, workload: Workload, machine: Machine) -> Shaped:
        """See `Strategy.shaped`."""
        return self.inner.shaped(workload, machine)

    def begin(self, workload: Workload, machine: Machine) -> None:
        """See `Strategy.begin`."""
        self.inner.begin(workload, machine)

    def execution(self, sizes: list[int], machine: Machine) -> Execution:
        """See `Strategy.execution`."""
        made = self.inner.execution(sizes, machine)
        if isinstance(made, Recomputing) and made.victims is not None:
            self._victims, made.victims = made.victims, self
        return made

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        self._check(0.0)
        self._began = execution.now
        return self.inner.plan(number, execution)

    def choose(self, execution: Recomputing) -> int | None:
        """See `Victims.choose`."""
        self._check(execution.now - self._began)
        assert self._victims is not None
        return self._victims.choose(execution)

    def observe(self, step: Step, result: StepResult) -> None:
        """See `Strategy.observe`."""
        self._check(result.seconds)
        self.inner.observe(step, result)

    def _check(self, taken: float) -> None:
        if taken > self.slowest_s:
            raise NoEndError(f"a step takes more than {format_seconds(self.slowest_s)}{STOPPED}")
        if time.monotonic() > self._until:
            raise NoEndError(
                f"simulating it came to no end within {format_seconds(self.patience_s)}{STOPPED}"
            )


def replayed(material: Material, traces: Sequence[Trace]) -> Workload:
    """Return the operators of ``traces``, their phases as long as those of the plain steps."""
    made = workload(traces)
    phases = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
    made.steps[:] = [
        step.timed(dict(zip(phases, known.seconds, strict=True)))
        for step, known in zip(made.steps, material.steps, strict=True)
    ]
    return made


def simulated(
    policy: str,
    material: Material,
    work: Workload,
    budget: int,
    sizing: Mapping[str, int] | None,
    refused: str,
    fit: Fit,
    counted: Sequence[int],
    slowest_s: float = math.inf,
) -> Side:
    """Simulate ``policy`` under a budget; see [Note: two simulations].

    Args:
        policy: a key of `POLICIES`.
        material: what plain training showed.
        work: the same, operator by operator.
        budget: bytes.
        sizing: how the runtime divides it, None if it refuses it.
        refused: why it does.
        fit: the machine.
        counted: numbers of the steps that count.
        slowest_s: seconds of a step at which an operator-by-operator simulation is stopped.
    """
    strategy = POLICIES[policy].strategy
    try:
        if strategy is not None:
            machine = replace(fit.machine, fast_bytes=budget, workers=IO_THREADS)
            if policy == SYSTEM:
                link = replace(machine.link, latency_s=0.0, fault_s=FAULT_S)
                machine = replace(machine, link=link)
            found = simulate(work, machine, Watched(inner=strategy(), slowest_s=slowest_s))
            return Side(found.infeasible) if found.infeasible else _side(found.steps, counted)
        if sizing is None:
            return Side(refused)  # the runtime divides the simulated budget, too
        if policy == BOUND:
            orders = tuple(step.order() for step in material.steps)
            material, policy = replace(material, orders=orders), PILOT
        made = simulation_fit.simulated(material, sizing, policy, fit.machine, fit.work)
        return _side(made.steps, counted)
    except ConfigError as error:  # the runtime does more than its simulation knows
        return Side(note=f"not simulated: {error}")
    except DynOffloadError as error:
        return Side(str(error))


def _side(steps: Sequence[StepResult], counted: Sequence[int]) -> Side:
    own = [steps[number] for number in counted]
    return Side(
        steps_s=tuple(step.seconds for step in own),
        bytes_in=fmean(step.bytes_in for step in own),
        bytes_out=fmean(step.bytes_out for step in own),
    )


def described() -> dict[str, Any]:
    """Return what is to be known of the policies, as JSON can hold it."""
    return {
        key: {
            "title": one.title,
            "measured": one.runs,
            "simulated": "the runtime" if one.strategy is None else "operators",
        }
        for key, one in POLICIES.items()
    }
