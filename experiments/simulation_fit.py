"""What the runtime itself takes, fitted on trainings that are not those to validate by.

What it is: `fitted`, a link and the seconds of the runtime's own work, from real trainings and
their simulations. What it is not: a fit of the network's work, nor of what the link moves in a
second, which are measured.

[Note: the fit]  Real seconds less simulated ones are explained, step by step and relative to the
real ones, by how often the runtime does what it does, with no negative cost (Lawson and Hanson's
non-negative least squares): visits, tensors saved and asked for, updates made by themselves, uses
planned, bytes copied, faults, and seconds of work beside transfers, which slow it down. That is
right where no fetch hides behind work, as in a roomy budget and on demand; writes still do, so it
is done twice. Before that a transfer's latency is taken from fetches that somebody waited for, as
what they took beyond their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from dynoffload.doctor import Tiers
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.own_work import Work

if TYPE_CHECKING:
    from dynoffload.experiments.simulation import Material, Real, Simulated

_ROUNDS = 2


@dataclass(frozen=True)
class Fit:
    """The machine with its link, and the runtime's own work."""

    machine: Machine
    work: Work


def fitted(cases: Sequence[tuple[Material, Real, str]], tiers: Tiers, warmup: int) -> Fit:
    """Return what fits ``cases`` best.

    Args:
        cases: materials, what was run, and the policies.
        tiers: the measured link.
        warmup: steps that do not count.
    """
    from scipy.optimize import nnls

    from dynoffload.experiments.simulation import simulated

    beyond = [
        seconds - nbytes / tiers.read_bps
        for _, real, policy in cases
        if policy == "on-demand"
        for seconds, nbytes in real.fetches
    ]
    latency = max(0.0, median(beyond)) if beyond else 0.0
    link = Link(tiers.read_bps, tiers.write_bps, tiers.mixed_bps, latency_s=latency)
    costs = np.zeros(7)
    fit = _fit_of(costs, link)
    for _ in range(_ROUNDS):
        rows, left = [], []
        for material, real, policy in cases:
            made = simulated(material, real.sizing, policy, fit.machine, fit.work)
            seconds = real.per_step("seconds")
            for step in range(warmup, len(seconds)):
                counted = _counted(made, step)
                ours = made.steps[step].seconds - float(counted @ costs)
                rows.append(counted / seconds[step])
                left.append((seconds[step] - ours) / seconds[step])
        table = np.array(rows)
        scale = np.where(table.any(axis=0), np.abs(table).max(axis=0), 1.0)
        found, _ = nnls(table / scale, np.array(left))
        costs = found / scale
        fit = _fit_of(costs, link)
    return fit


def _counted(made: Simulated, step: int) -> np.ndarray:
    counts, result = made.counts[step], made.steps[step]
    own = (counts.visits, counts.saves, counts.updates, counts.planned, counts.copied)
    return np.array([*own, result.faults, result.beside_s], dtype=float)


def _fit_of(costs: np.ndarray, link: Link) -> Fit:
    visit, save, update, plan, copy, fault, beside = map(float, costs)
    machine = Machine(
        replace(link, fault_s=fault), fast_bytes=1, interference=beside / (1.0 + beside)
    )
    return Fit(machine, Work(visit, save, update, plan, copy))
