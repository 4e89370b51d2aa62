"""What the runtime itself takes, fitted on trainings that are not those to validate by.

What it is: `fitted`, a link and the seconds of the runtime's own work, from real trainings and
their simulations. What it is not: a fit of the network's work, nor of what the link moves in a
second, which are measured.

[Note: the fit]  Real seconds less simulated ones are explained, setting by setting and relative to
the real ones, by how often the runtime does what it does, with no negative cost (Lawson and
Hanson's non-negative least squares): visits, tensors saved and asked for, updates made by
themselves, uses planned, bytes copied, faults, and seconds of work beside transfers. Part of that
hides behind transfers, and the other way round, so the simulation is made anew with what was found,
and half of the way gone, several times. What the kernel takes to move pages is measured, not
fitted. Before all that a transfer's latency is taken from fetches that somebody waited for, as what
they took beyond their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np

from dynoffload.doctor import Moves
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.own_work import Work

if TYPE_CHECKING:
    from dynoffload.experiments.simulation import Material, Real, Simulated

_ROUNDS = 8
_COSTS = 7


@dataclass(frozen=True)
class Fit:
    """The machine with its link, and the runtime's own work."""

    machine: Machine
    work: Work

    def on(self, link: Link) -> Machine:
        """Return the machine with the bandwidths of another hour."""
        own = self.machine.link
        link = replace(link, latency_s=own.latency_s, fault_s=own.fault_s)
        return replace(self.machine, link=link)


def fitted(
    cases: Sequence[tuple[Material, Real, str]], link: Link, moves: Moves, warmup: int
) -> Fit:
    """Return what fits ``cases`` best.

    Args:
        cases: materials, what was run, and the policies.
        link: as measured; each case has its own besides.
        moves: as measured.
        warmup: steps that do not count.
    """
    from scipy.optimize import nnls

    from dynoffload.experiments.simulation import simulated

    beyond = [
        seconds - nbytes / real.link.read_bps
        for _, real, policy in cases
        if policy == "on-demand"
        for seconds, nbytes in real.fetches
    ]
    link = replace(link, latency_s=max(0.0, median(beyond)) if beyond else 0.0)
    costs = np.zeros(_COSTS)
    for number in range(_ROUNDS):
        fit = _fit_of(costs, link, moves)
        rows, left = [], []
        for material, real, policy in cases:
            made = simulated(material, real.sizing, policy, fit.on(real.link), fit.work)
            seconds = real.per_step("seconds")
            steps = range(warmup, len(seconds))
            theirs = mean(seconds[step] for step in steps)
            counted = np.mean([_counted(made, step) for step in steps], axis=0)
            ours = mean(made.steps[step].seconds for step in steps) - float(counted @ costs)
            rows.append(counted / theirs)
            left.append((theirs - ours) / theirs)
        table = np.array(rows)
        scale = np.where(table.any(axis=0), np.abs(table).max(axis=0), 1.0)
        found, _ = nnls(table / scale, np.array(left))
        costs = found / scale if number == 0 else (costs + found / scale) / 2
    return _fit_of(costs, link, moves)


def _counted(made: Simulated, step: int) -> np.ndarray:
    counts, result = made.counts[step], made.steps[step]
    own = (counts.visits, counts.saves, counts.updates, counts.planned, counts.copied)
    return np.array([*own, result.faults, result.beside_s], dtype=float)


def _fit_of(costs: np.ndarray, link: Link, moves: Moves) -> Fit:
    visit, save, update, plan, copy, fault, beside = map(float, costs)
    machine = Machine(
        replace(link, fault_s=fault), fast_bytes=1, interference=beside / (1 + beside)
    )
    return Fit(machine, Work(visit, save, update, plan, copy, **vars(moves)))
