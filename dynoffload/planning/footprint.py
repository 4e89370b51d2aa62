"""What a recorded step asks of memory: what it keeps, what one operator needs, what a plan moves.

Only what the runtime manages counts. Temporaries of operators are measured apart (`temporaries`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynoffload.errors import BudgetError, TraceError
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Use
from dynoffload.profiler.trace import Phase, RegionInfo, Trace, owner_of

_KEPT = frozenset(("parameter", "buffer", "state"))


@dataclass(frozen=True)
class Footprint:
    """What one recorded step asks of memory, in bytes.

    Attributes:
        total: of everything managed, had it all stayed in memory.
        need: of the operator that needs most at once; no budget below it is feasible.
        moved_in: that a plan with the step foreknown reads; None if there is none.
        moved_out: that it writes; None if there is none.
    """

    total: int
    need: int
    moved_in: int | None = None
    moved_out: int | None = None


def footprint(trace: Trace) -> Footprint:
    """Return the footprint of a recorded step.

    Of activations only the saved ones count: made in forward, read again in backward. Operators
    of the optimizer count by parameter, however many they update at once, as they can be split;
    all that the update of one parameter touches is held together.

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


def plan_recorded(trace: Trace, budget: int) -> Footprint:
    """Return the footprint with what `LookAhead` moves under ``budget`` bytes, nothing resident at
    first: what a prediction that is right throughout would get."""
    if not trace.operators:
        return Footprint(0, 0, 0, 0)
    kept = footprint(trace)
    uses, sizes = _recorded_uses(trace)
    try:
        schedule = LookAhead().plan(uses, sizes, budget, ())
    except BudgetError:
        return kept
    return replace(kept, moved_in=schedule.bytes_in, moved_out=schedule.bytes_out)


def _recorded_uses(trace: Trace) -> tuple[list[Use], list[int]]:
    """Return the reference string of a trace, and the sizes of its regions.

    One use for each operator that touches what is managed: parameters, buffers, gradients,
    optimizer state and saved activations. Gradients and activations are created where they are
    first met, unless the step was given them, and end with their last use. The optimizer's
    operators are taken apart by parameter, as `footprint` does.
    """
    saved = saved_activations(trace)
    managed = [
        index in saved or region.kind in _KEPT or region.kind == "gradient"
        for index, region in enumerate(trace.regions)
    ]
    passing = [
        here and region.kind not in _KEPT
        for here, region in zip(managed, trace.regions, strict=True)
    ]
    parts: list[tuple[tuple[int, ...], frozenset[int], float]] = []
    for operator in trace.operators:
        touched = [
            index for index in dict.fromkeys((*operator.reads, *operator.writes)) if managed[index]
        ]
        if not touched:
            continue
        written = frozenset(operator.writes)
        if operator.phase is not Phase.OPTIMIZER:
            parts.append((tuple(touched), written, operator.seconds))
            continue
        by_parameter: dict[str, list[int]] = defaultdict(list)
        for index in touched:
            by_parameter[trace.regions[index].name.partition(":")[0]].append(index)
        share = operator.seconds / len(by_parameter)
        parts += [(tuple(own), written, share) for own in by_parameter.values()]
    last = {index: number for number, (own, _, _) in enumerate(parts) for index in own}
    alive = {i for i, region in enumerate(trace.regions) if passing[i] and region.born < 0}
    uses: list[Use] = []
    for number, (own, written, seconds) in enumerate(parts):
        creates = tuple(index for index in own if passing[index] and index not in alive)
        alive.update(creates)
        frees = tuple(index for index in own if passing[index] and last[index] == number)
        writes = tuple(index for index in own if index in written)
        uses.append(Use(own, creates, frees, seconds, writes))
    return uses, [region.nbytes for region in trace.regions]


def temporaries(trace: Trace) -> int:
    """Return the most bytes alive at one moment of what a recorded step makes and does not save.

    It is what operators need beside all that is managed, without what libraries take themselves.
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
    """Return the bytes among ``regions`` of the parameter that has the most."""
    sizes: dict[str, int] = defaultdict(int)
    for region in regions:
        if owner_of(region) is not None:
            sizes[region.name.partition(":")[0]] += region.nbytes
    return max(sizes.values(), default=0)


def _peak(trace: Trace, saved: set[int]) -> int:
    """Return the most bytes of ``saved`` alive at one moment."""
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
