"""Fits a cost model to traces of one machine; scipy is imported where it is used.

[Note: how it is fitted]
Operators of equal work form one observation, the median of their seconds, so occasional outliers do
not count. The loss is the weighted mean of |log(predicted / measured)|: a factor of two is as bad
at a microsecond as at a second, and outliers have bounded gradients. An observation's weight is its
number of calls times the square root of its seconds, a compromise between calls and time. First the
parameters of each kind are fitted: overhead and bandwidth of memory; the median of calls; overhead,
half intensity and peak of products in the dtype that took longest, then the peak of each other
dtype. Then each operator's two factors, with a penalty of |log factor| divided by its number of
observations. Operators seen at few sizes, or close to their kind, thus keep factors of 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from dynoffload.errors import TraceError
from dynoffload.profiler.costs import CostModel, Factors, Kind, Work, described, work_of
from dynoffload.profiler.trace import Trace

_Array = NDArray[np.float64]
_PENALTY = 1.0
SHORTEST = 1e-8
"""Shortest time in seconds that a clock resolves; shorter measurements are raised to it."""
_TYPICAL = {Kind.CALL: 2e-6, Kind.MEMORY: 4e-6, Kind.PRODUCT: 1e-5}  # where a fit starts


@dataclass(frozen=True)
class _Seen:
    """Observations, one for each distinct `Work`."""

    works: Sequence[Work]
    seconds: _Array
    weight: _Array

    def where(self, holds: Callable[[Work], bool]) -> _Seen:
        kept = [i for i, work in enumerate(self.works) if holds(work)]
        return _Seen([self.works[i] for i in kept], self.seconds[kept], self.weight[kept])

    @cached_property
    def flops(self) -> _Array:
        return np.array([work.flops for work in self.works], np.float64)

    @cached_property
    def nbytes(self) -> _Array:
        return np.array([work.nbytes for work in self.works], np.float64)

    def miss(self, predicted: _Array) -> float:
        """Return the loss of a prediction."""
        off = np.abs(np.log(predicted / self.seconds))
        return float((self.weight * off).sum() / self.weight.sum())


def fit(traces: Iterable[Trace], *, source: str = "") -> CostModel:
    """Return the cost model of the machine on which ``traces`` were recorded.

    Omit the first step of a training run: it also does one-time work such as allocating state.

    Args:
        traces: traces of any networks on that machine; more distinct sizes fit better.
        source: stored as the model's `CostModel.source`.

    Raises:
        TraceError: a trace lacks FLOPs, or no operator moved any bytes.
    """
    seen = _observed(traces)
    memory = seen.where(lambda work: work.kind is Kind.MEMORY)
    if not memory.works:
        raise TraceError("nothing to fit a cost model to: no operator of the traces moved a byte")
    overhead = dict(_TYPICAL)
    overhead[Kind.MEMORY], bandwidth = _fit_memory(memory)
    calls = seen.where(lambda work: work.kind is Kind.CALL)
    if calls.works:
        overhead[Kind.CALL] = _weighted_median(calls.seconds, calls.weight)
    products = seen.where(lambda work: work.kind is Kind.PRODUCT)
    peak: dict[str, float] = {}
    half = 0.0
    if products.works:
        overhead[Kind.PRODUCT], peak, half = _fit_products(products, bandwidth)
    model = CostModel(peak, bandwidth, overhead, half, {}, source)
    return replace(model, operators=_fit_operators(seen, model))


def _observed(traces: Iterable[Trace]) -> _Seen:
    took: defaultdict[Work, list[float]] = defaultdict(list)
    for trace in traces:
        lacking = next((op.name for op in trace.operators if op.flops is None), None)
        if lacking is not None:
            raise TraceError(
                f"{described(trace)}: FLOPs of {lacking} are not known, so no cost model can be"
                " fitted to it: record it again with `dynoffload profile`"
            )
        for operator in trace.operators:
            took[work_of(operator)].append(max(operator.seconds, SHORTEST))
    seconds = np.array([float(np.median(every)) for every in took.values()])
    counts = np.array([len(every) for every in took.values()], np.float64)
    return _Seen(list(took), seconds, counts * np.sqrt(seconds))


def _fit_memory(seen: _Seen) -> tuple[float, float]:
    """Return overhead and bandwidth."""
    moved = seen.nbytes
    fastest = float(np.quantile(moved / seen.seconds, 0.9))
    starts = [(_TYPICAL[Kind.MEMORY], fastest), (_TYPICAL[Kind.MEMORY], fastest / 4)]
    overhead, bandwidth = _least(lambda p: seen.miss(p[0] + moved / p[1]), starts)
    return float(overhead), float(bandwidth)


def _fit_products(seen: _Seen, bandwidth: float) -> tuple[float, dict[str, float], float]:
    """Return overhead, peak by dtype and half intensity."""
    taken: defaultdict[str, float] = defaultdict(float)
    for work, weight in zip(seen.works, seen.weight * np.sqrt(seen.seconds), strict=True):
        taken[work.dtype] += float(weight)
    first, *others = sorted(taken, key=lambda dtype: -taken[dtype])
    main = seen.where(lambda work: work.dtype == first)
    fastest = float(np.quantile(main.flops / main.seconds, 0.9))
    start = _TYPICAL[Kind.PRODUCT]
    overhead, top, half = _least(
        lambda p: _miss_of_peak(main, p[0], p[2], bandwidth, p[1:2]),
        [(start, fastest, 10.0), (start, 2 * fastest, 50.0)],
    )
    peak = {first: float(top)}
    for dtype in others:
        own = seen.where(lambda work, dtype=dtype: work.dtype == dtype)  # type: ignore[misc]
        fastest = float(np.quantile(own.flops / own.seconds, 0.9))
        (found,) = _least(
            partial(_miss_of_peak, own, overhead, half, bandwidth), [(fastest,), (2 * fastest,)]
        )
        peak[dtype] = float(found)
    return float(overhead), peak, float(half)


def _miss_of_peak(
    seen: _Seen, overhead: float, half: float, bandwidth: float, peak: Sequence[float]
) -> float:
    rest = np.maximum((seen.flops + half * seen.nbytes) / peak[0], seen.nbytes / bandwidth)
    return seen.miss(overhead + rest)


def _fit_operators(seen: _Seen, model: CostModel) -> dict[str, Factors]:
    """Return the factors of each observed operator."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for index, work in enumerate(seen.works):
        places[work.name].append(index)
    found = {}
    for name, indices in places.items():
        own = _Seen([seen.works[i] for i in indices], seen.seconds[indices], seen.weight[indices])
        overhead = np.array([model.overhead[work.kind] for work in own.works])
        rest = np.array([model.rest(work) for work in own.works])

        def loss(
            p: Sequence[float], own: _Seen = own, overhead: _Array = overhead, rest: _Array = rest
        ) -> float:
            penalty = _PENALTY / len(own.works) * float(np.abs(np.log(p)).sum())
            return own.miss(overhead * p[0] + rest * p[1]) + penalty

        slower = float(np.exp(np.log(own.seconds / (overhead + rest)).mean()))
        found[name] = Factors(*_least(loss, [(1.0, 1.0), (slower, slower), (1.0, slower)]))
    return found


def _least(
    loss: Callable[[Sequence[float]], float], starts: Sequence[tuple[float, ...]]
) -> tuple[float, ...]:
    """Return the positive parameters with the least loss, searched from each start."""
    from scipy.optimize import minimize

    options = {"xatol": 1e-3, "fatol": 1e-6, "maxiter": 1000}
    results = [
        minimize(lambda x: loss(np.exp(x)), np.log(start), method="Nelder-Mead", options=options)
        for start in starts
    ]
    best = min(results, key=lambda result: float(result.fun))
    return tuple(float(value) for value in np.exp(best.x))


def _weighted_median(values: _Array, weight: _Array) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
