"""Real steps beside simulated ones; what the runtime itself takes is fitted to the difference.

[Note: the fit]  Real seconds less simulated ones are explained, setting by setting and phase by
phase, by how often the runtime does what it does, with no negative cost (non-negative least
squares): what takes each of `COSTS`, faults, and seconds of work beside transfers. Part of all this
hides behind transfers, so the simulation is made anew with what was found, and half of the way
gone, several times. What the kernel takes to move pages is measured, and the runtime's own work is
carried to one pace (`probe_overhead`). A transfer's latency is what fetches that somebody waited
for took beyond their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from dynoffload.config import OffloadConfig
from dynoffload.estimation.calibration import Fitted
from dynoffload.runtime.opening import IO_THREADS
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.fast_memory import StepResult
from dynoffload.simulation.overhead import COSTS, Division, Phase, RuntimeOverhead
from dynoffload.simulation.recorded import Network, Recorded
from dynoffload.simulation.training import Training

_ROUNDS = 8
_BESIDES = 2  # faults, and work beside transfers
PHASES = ("forward_s", "backward_s", "optimizer_s")
"""Numbers of a real step, by the phases that `Training` tells."""


@dataclass(frozen=True)
class Material:
    """What is known of a network from plain training.

    Attributes:
        network: what moves of it.
        steps: what happens in each step, with the times of plain steps.
        orders: the paths that are predicted for each step, or None.
        footprint: bytes of parameters, gradients, state and what the largest step saves.
    """

    network: Network
    steps: tuple[Recorded, ...]
    orders: tuple[Sequence[str] | None, ...]
    footprint: int

    def timed(self, runs: Sequence[Sequence[Sequence[float]]]) -> Material:
        """Return the same with the times of other plain trainings: run by run and step by step the
        seconds of forward, backward and optimizer, of which each step's median counts."""
        times = [
            [median(parts) for parts in zip(*each, strict=True)] for each in zip(*runs, strict=True)
        ]
        steps = zip(self.steps, times, strict=True)
        return replace(self, steps=tuple(step.timed(*seconds) for step, seconds in steps))


@dataclass(frozen=True)
class Real:
    """What a setting did, run by run and step by step.

    Attributes:
        runs: numbers of each step.
        sizing: how the budget was divided.
        fetches: seconds and bytes of what was waited for.
        backend: of the session.
        link: as measured before.
        plain: the seconds of forward, backward and optimizer of plain steps, each run's before it:
            how fast the machine is, and its link, changes from minute to minute.
        pace_s: of the runtime's own work, as measured before; see `probe_overhead`.
        moves: seconds in which the kernel moved a page then, by its bytes.
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
        """Return the median over runs of one number of each step."""
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
    """Simulate the steps of ``material`` under a divided budget."""
    keys = [key for key in Division.__dataclass_fields__ if key in sizing]
    options = OffloadConfig()
    division = Division(**{key: sizing[key] for key in keys}, draft_share=options.draft_share)
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
    """Return what fits ``cases`` best.

    Args:
        cases: materials, what was run, and the policies.
        link: as measured; each case has its own besides.
        warmup: steps that do not count.
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
