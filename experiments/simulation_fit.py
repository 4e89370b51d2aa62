"""Fits the runtime's overhead to the difference between real and simulated steps.

[Note: the fit]  For each setting and phase, real minus simulated seconds are explained by counts of
the runtime's operations with costs that are not negative (non-negative least squares): each of
`COSTS`, faults, and seconds of work concurrent with transfers. Part of the overhead is hidden
behind transfers, so simulation and fit are repeated several times; each round moves halfway to the
new costs. The kernel's time for moving pages is measured, and the runtime's overhead is scaled to
one pace (`probe_overhead`). A transfer's latency is the median time that on-demand fetches took
beyond their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from dynoffload.estimation.calibration import Fitted
from dynoffload.runtime.opening import IO_THREADS
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.fast_memory import StepResult
from dynoffload.simulation.overhead import COSTS, Division, Phase, RuntimeOverhead
from dynoffload.simulation.recorded import Network, Recorded
from dynoffload.simulation.training import Training

_ROUNDS = 8
_BESIDES = 2  # faults, and work concurrent with transfers
PHASES = ("forward_s", "backward_s", "optimizer_s")
"""Times of a real step, in the order of `Training.phases`."""


@dataclass(frozen=True)
class Material:
    """Data of a network from plain training.

    Attributes:
        network: its parameters and the modules that own them.
        steps: recorded steps, with the times of plain steps.
        orders: the predicted module paths of each step, or None.
        footprint: bytes of parameters, gradients, state and the largest step's saved tensors.
    """

    network: Network
    steps: tuple[Recorded, ...]
    orders: tuple[Sequence[str] | None, ...]
    footprint: int

    def timed(self, runs: Sequence[Sequence[Sequence[float]]]) -> Material:
        """Return a copy with the times of other plain trainings, by run and step: the seconds of
        forward, backward and optimizer. Each step's median over runs is used."""
        times = [
            [median(parts) for parts in zip(*each, strict=True)] for each in zip(*runs, strict=True)
        ]
        steps = zip(self.steps, times, strict=True)
        return replace(self, steps=tuple(step.timed(*seconds) for step, seconds in steps))


@dataclass(frozen=True)
class Real:
    """Measurements of a setting, by run and step.

    Attributes:
        runs: statistics of each step.
        sizing: how the budget was divided.
        fetches: seconds and bytes of on-demand fetches.
        backend: of the session.
        link: as measured just before.
        plain: the seconds of forward, backward and optimizer of plain steps, measured before each
            run, as the speed of machine and link drifts within minutes.
        pace_s: of the runtime's overhead, as measured just before; see `probe_overhead`.
        moves: page size in bytes -> seconds in which the kernel moves a page.
    """

    runs: tuple[Sequence[Mapping[str, Any]], ...]
    sizing: Mapping[str, int]
    fetches: tuple[tuple[float, int], ...]
    backend: str
    link: Link
    plain: tuple[Sequence[Sequence[float]], ...]
    pace_s: float
    moves: Mapping[int, float]

    def per_step(self, key: str) -> list[float]:
        """Return each step's median over runs of one number."""
        return [median(run[step][key] for run in self.runs) for step in range(len(self.runs[0]))]


@dataclass(frozen=True)
class Simulated:
    """The same steps, simulated."""

    steps: tuple[StepResult, ...]
    phases: tuple[Sequence[Phase], ...]


def simulated(
    material: Material,
    sizing: Mapping[str, int],
    policy: str,
    machine: Machine,
    work: RuntimeOverhead,
) -> Simulated:
    """Simulate the steps of ``material`` under a budget divided by ``sizing``."""
    keys = [key for key in Division.__dataclass_fields__ if key in sizing]
    division = Division(**{key: sizing[key] for key in keys})
    machine = replace(machine, workers=IO_THREADS)
    training = Training(
        material.network, division, machine, prefetch=policy != "on-demand", work=work
    )
    results, phases = [], []
    for step, order in zip(material.steps, material.orders, strict=True):
        results.append(training.step(step, order if policy == "pilot" else None))
        phases.append(training.phases)
    return Simulated(tuple(results), tuple(phases))


def fitted(cases: Sequence[tuple[Material, Real, str]], link: Link, warmup: int) -> Fitted:
    """Return the machine and overhead that fit ``cases`` best.

    Args:
        cases: materials, real runs, and policies.
        link: as measured; each case also has its own.
        warmup: first steps, which are not used.
    """
    from scipy.optimize import nnls

    beyond = [
        seconds - nbytes / real.link.read_bps
        for _, real, policy in cases
        if policy == "on-demand"
        for seconds, nbytes in real.fetches
    ]
    link = replace(link, latency_s=max(0.0, median(beyond)) if beyond else 0.0)
    pace_s = median(real.pace_s for _, real, _ in cases)
    costs = np.zeros(len(COSTS) + _BESIDES)
    for number in range(_ROUNDS):
        fit = _fit_of(costs, link, pace_s)
        rows, left = [], []
        for material, real, policy in cases:
            work = fit.at(real.pace_s, real.moves)
            made = simulated(material, real.sizing, policy, fit.on(real.link), work)
            steps = range(warmup, len(made.steps))
            whole = mean(real.per_step("seconds")[step] for step in steps)
            for index, key in enumerate(PHASES):
                phases = [made.phases[step][index] for step in steps]
                counted = np.mean([_counted(phase) for phase in phases], axis=0)
                counted[: len(COSTS)] *= real.pace_s / pace_s
                theirs = mean(real.per_step(key)[step] for step in steps)
                ours = mean(phase.seconds for phase in phases) - float(counted @ costs)
                rows.append(counted / whole)
                left.append((theirs - ours) / whole)
        table = np.array(rows)
        scale = np.where(table.any(axis=0), np.abs(table).max(axis=0), 1.0)
        found, _ = nnls(table / scale, np.array(left))
        costs = found / scale if number == 0 else (costs + found / scale) / 2
    fit, every = _fit_of(costs, link, pace_s), [real.moves for _, real, _ in cases]
    usual = {page: median(one[page] for one in every) for page in every[0]}
    return replace(fit, work=fit.at(pace_s, usual))


def _counted(phase: Phase) -> np.ndarray:
    own = (phase.counts[name] for name in COSTS)
    return np.array([*own, phase.faults, phase.beside_s], dtype=float)


def _fit_of(costs: np.ndarray, link: Link, pace_s: float) -> Fitted:
    *own, fault, beside = map(float, costs)
    machine = Machine(
        replace(link, fault_s=fault), fast_bytes=1, interference=beside / (1 + beside)
    )
    work = RuntimeOverhead(**dict(zip(COSTS, own, strict=True)), moves={})
    return Fitted(machine, work, pace_s)
