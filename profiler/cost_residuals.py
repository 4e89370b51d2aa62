"""What a cost model misses on measured steps that it was not fitted to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynoffload.errors import TraceError
from dynoffload.profiler.cost_fitting import SHORTEST
from dynoffload.profiler.costs import CostModel
from dynoffload.profiler.trace import Trace
from dynoffload.profiler.work import Kind, work_of


@dataclass(frozen=True)
class Errors:
    """The relative error |predicted / measured - 1| of several times.

    Attributes:
        median: half of them err no more; of operators, half of the time is in such.
        p90: nine in ten.
        bias: predicted over measured, of all together, less 1.
        seconds: measured, of all together.
    """

    median: float
    p90: float
    bias: float
    seconds: float


@dataclass(frozen=True)
class Residual:
    """What a cost model misses on measured steps.

    Attributes:
        steps: of the whole steps, each counted once.
        operators: of single operators, each counted by its time.
        kinds: the same by kind.
    """

    steps: Errors
    operators: Errors
    kinds: Mapping[Kind, Errors]


def residual(pairs: Iterable[tuple[CostModel, Trace]]) -> Residual:
    """Return what models miss, each on a trace that it was not fitted to.

    Raises:
        TraceError: there is nothing to compare, or a trace lacks FLOPs.
    """
    steps: list[tuple[float, float]] = []
    every: defaultdict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for model, trace in pairs:
        timing = model.time(trace)
        steps.append((timing.seconds, sum(operator.seconds for operator in trace.operators)))
        for operator, predicted in zip(trace.operators, timing.operators, strict=True):
            every[work_of(operator).kind].append((predicted, max(operator.seconds, SHORTEST)))
    if not every:
        raise TraceError("no operators to compare a cost model with")
    kinds = {kind: _errors(every[kind], by_time=True) for kind in Kind if every[kind]}
    together = [pair for found in every.values() for pair in found]
    return Residual(_errors(steps), _errors(together, by_time=True), kinds)


def _errors(pairs: Sequence[tuple[float, float]], *, by_time: bool = False) -> Errors:
    predicted, measured = np.array(pairs, np.float64).T
    relative = np.abs(predicted / measured - 1)
    weight = measured if by_time else np.ones_like(measured)
    order = np.argsort(relative)
    reached = np.cumsum(weight[order]) / weight.sum()

    def at(share: float) -> float:
        return float(relative[order][min(np.searchsorted(reached, share), len(order) - 1)])

    total = float(measured.sum())
    return Errors(at(0.5), at(0.9), float(predicted.sum()) / total - 1, total)
