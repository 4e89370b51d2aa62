"""A recorded step as the planner would have had it run, had it known the step beforehand.

What it is: `recorded_uses`, the reference string of a trace, and `plan_recorded`, what `LookAhead`
moves on it under a budget: what a prediction that is right throughout would get. What it is not: a
simulation (`dynoffload.simulation`), which takes seconds too. Regions are those that the runtime
manages, so temporaries and inputs do not count.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from dynoffload.errors import BudgetError
from dynoffload.planning.footprint import footprint, saved_activations
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Use
from dynoffload.profiler.trace import Phase, Trace

_KEPT = frozenset(("parameter", "buffer", "state"))


@dataclass(frozen=True)
class PlannedStep:
    """What one recorded step asks of memory, in bytes.

    Attributes:
        total: of everything managed, had it all stayed in memory.
        need: of the operator that needs most at once; no budget below it is feasible.
        moved_in: that a plan with the step foreknown reads; None if the step does not fit.
        moved_out: that it writes; None if the step does not fit.
    """

    total: int
    need: int
    moved_in: int | None = None
    moved_out: int | None = None


def plan_recorded(trace: Trace, budget: int) -> PlannedStep:
    """Plan a recorded step under ``budget`` bytes of fast memory, nothing resident at first."""
    if not trace.operators:
        return PlannedStep(0, 0, 0, 0)
    kept = footprint(trace)
    uses, sizes = recorded_uses(trace)
    try:
        schedule = LookAhead().plan(uses, sizes, budget, ())
    except BudgetError:
        return PlannedStep(kept.total, kept.largest.nbytes)
    return PlannedStep(kept.total, kept.largest.nbytes, schedule.bytes_in, schedule.bytes_out)


def recorded_uses(trace: Trace) -> tuple[list[Use], list[int]]:
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
