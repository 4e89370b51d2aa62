"""The policies whose step times are compared, and each one simulated.

[Note: two simulations]  What the runtime does by a plan or on demand is simulated as it does it
(`dynoffload.simulation.Training`): by regions of whole pages, with its own work. Clairvoyance is
the same runtime, told every step. The other policies are simulated operator by operator
(`dynoffload.simulation.simulate`), on the same link and with the same seconds of plain steps. What
a runtime of theirs would take itself is left out, so the two are not ranked together.

Paging by the system is simulated as unified memory, by pages of `PAGE_BYTES`, each for `FAULT_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from dynoffload.errors import ConfigError, DynOffloadError
from dynoffload.experiments import simulation_fit
from dynoffload.experiments.baselines import DTR as DTR_RUN
from dynoffload.experiments.baselines import REPLAY
from dynoffload.experiments.baselines.intervals import Intervals
from dynoffload.experiments.baselines.recomputing import DTR, Capuchin
from dynoffload.experiments.baselines.simulated import Replay, UnifiedMemory
from dynoffload.experiments.contest import Side
from dynoffload.experiments.processes import fresh
from dynoffload.experiments.simulation_fit import Fit, Material
from dynoffload.profiler.trace import Phase, Trace
from dynoffload.runtime.opening import IO_THREADS
from dynoffload.simulation import Strategy, Workload, simulate, workload
from dynoffload.simulation.execution import StepResult
from dynoffload.units import KiB

PAGE_BYTES = 64 * KiB
FAULT_S = 3e-5
"""Of a fault of unified memory: 20 to 50 microseconds are published for its service."""
PATIENCE_S = 30.0
"""Of one simulation: a rule that makes again what it has just dropped comes to no end."""
PILOT = "pilot"
BOUND = "clairvoyant"
"""The runtime, told every step: what a prediction could reach, and none of them."""
SYSTEM = "os-paging"


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
    patience: float = PATIENCE_S,
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
        patience: seconds after which a simulation by operators is given up.
    """
    try:
        if POLICIES[policy].strategy is not None:
            name = f"{policy}, simulated"
            return fresh(name, by_operators, policy, work, budget, fit, counted, patience=patience)
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


def by_operators(
    policy: str, work: Workload, budget: int, fit: Fit, counted: Sequence[int]
) -> Side:
    """Simulate a policy that is not the runtime's, operator by operator."""
    strategy = POLICIES[policy].strategy
    assert strategy is not None
    machine = replace(fit.machine, fast_bytes=budget, workers=IO_THREADS)
    if policy == SYSTEM:
        machine = replace(machine, link=replace(machine.link, latency_s=0.0, fault_s=FAULT_S))
    found = simulate(work, machine, strategy())
    return Side(found.infeasible) if found.infeasible else _side(found.steps, counted)


def _side(steps: Sequence[StepResult], counted: Sequence[int]) -> Side:
    own = [steps[number] for number in counted]
    return Side(
        steps_s=tuple(step.seconds for step in own),
        bytes_in=fmean(step.bytes_in for step in own),
        bytes_out=fmean(step.bytes_out for step in own),
    )
