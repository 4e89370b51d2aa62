"""Memory of a recorded step: what the runtime manages, and what its operators need beside that."""

from __future__ import annotations

from dynoffload.errors import TraceError
from dynoffload.profiler.trace import Phase, Trace

_KEPT = frozenset(("parameter", "buffer", "state", "gradient"))


def footprint(trace: Trace) -> int:
    """Return the peak bytes of all managed regions of a recorded step if nothing were evicted.

    Of activations only saved ones count: made in forward and read again in backward.

    Raises:
        TraceError: if the trace has no operators.
    """
    if not trace.operators:
        raise TraceError(
            f"the trace of step {trace.step} ({trace.source!r}) has no operators; record it again"
        )
    total = sum(region.nbytes for region in trace.regions if region.kind in _KEPT)
    return total + _peak(trace, saved_activations(trace))


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
