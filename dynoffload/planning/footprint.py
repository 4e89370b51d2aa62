"""Memory needs of a recorded step: the total, and the most that one operator needs.

Only regions that the runtime manages count. `temporaries` measures the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from dynoffload.errors import TraceError
from dynoffload.profiler.trace import Phase, RegionInfo, Trace, owner_of

_KEPT = frozenset(("parameter", "buffer", "state"))


@dataclass(frozen=True)
class Footprint:
    """Memory needs of one recorded step, in bytes.

    Attributes:
        total: peak of all managed regions if nothing were evicted.
        need: most that one operator needs at once; no budget below it is feasible.
    """

    total: int
    need: int


def footprint(trace: Trace) -> Footprint:
    """Return the footprint of a recorded step.

    Only saved activations count: made in forward and read again in backward. Optimizer operators
    count by parameter, even if they update many at once, since they can be split. All regions that
    the update of one parameter touches are needed together.

    Raises:
        TraceError: if the trace has no operators.
    """
    if not trace.operators:
        raise TraceError(
            f"the trace of step {trace.step} ({trace.source!r}) has no operators; record it again"
        )
    saved = saved_activations(trace)
    need = 0
    updated: dict[int, None] = {}
    for operator in trace.operators:
        touched = dict.fromkeys((*operator.reads, *operator.writes))
        if operator.phase is Phase.OPTIMIZER:
            updated |= touched
            continue
        managed = (
            trace.regions[index].nbytes
            for index in touched
            if index in saved or trace.regions[index].kind not in ("activation", "input")
        )
        need = max(need, sum(managed))
    need = max(need, _largest_update(trace.regions[index] for index in updated))
    total = sum(r.nbytes for r in trace.regions if r.kind in _KEPT or r.kind == "gradient")
    return Footprint(total + _peak(trace, saved), need)


def temporaries(trace: Trace) -> int:
    """Return the peak bytes of the activations that a recorded step makes and does not save.

    Operators need them in addition to the managed regions; memory of libraries is not included.
    """
    made = {n for n, region in enumerate(trace.regions) if region.kind == "activation"}
    return _peak(trace, made - saved_activations(trace))


def saved_activations(trace: Trace) -> set[int]:
    """Return the activations that forward made and backward reads."""
    made = {
        index
        for operator in trace.operators
        if operator.phase is Phase.FORWARD
        for index in operator.writes
        if trace.regions[index].kind == "activation"
    }
    return {
        index
        for operator in trace.operators
        if operator.phase is Phase.BACKWARD
        for index in operator.reads
        if index in made
    }


def _largest_update(regions: Iterable[RegionInfo]) -> int:
    """Return the most bytes of ``regions`` that belong to one parameter."""
    sizes: dict[str, int] = defaultdict(int)
    for region in regions:
        if owner_of(region) is not None:
            sizes[region.name.partition(":")[0]] += region.nbytes
    return max(sizes.values(), default=0)


def _peak(trace: Trace, saved: set[int]) -> int:
    """Return the peak bytes of the ``saved`` regions."""
    change = [0] * (len(trace.operators) + 2)  # a region may be born or freed after the last one
    for index in saved:
        region = trace.regions[index]
        died = region.died if region.died >= 0 else len(trace.operators) - 1
        change[max(region.born, 0)] += region.nbytes
        change[died + 1] -= region.nbytes
    alive = peak = 0
    for step in change:
        alive += step
        peak = max(peak, alive)
    return peak
