"""The footprint: what a recorded step keeps in memory, and what one operator of it needs at once.

What it is: the sizes by which a budget is judged before training. What it is not: the whole need of
a process; operator temporaries and library buffers are the headroom, which is measured, and the
runtime adds its own staging and reserve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from dynoffload.errors import BudgetError, TraceError
from dynoffload.profiler.trace import Phase, RegionInfo, Trace, owner_of
from dynoffload.units import format_bytes


@dataclass(frozen=True)
class WorkingSet:
    """The managed regions that one operator touches.

    Attributes:
        operator: full name of the operator; the update of a parameter counts as one.
        site: path of the module it ran for; in the optimizer, the parameter.
        phase: forward, backward or optimizer.
        nbytes: bytes of the regions together.
    """

    operator: str
    site: str
    phase: Phase
    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """What one step keeps, in bytes.

    Attributes:
        parameters: all parameters and buffers that the step used.
        gradients: their gradients.
        state: their optimizer state.
        activations: most bytes of saved activations alive at one moment.
        largest: the operator that needs most at once; no budget below it is feasible.
    """

    parameters: int
    gradients: int
    state: int
    activations: int
    largest: WorkingSet

    @property
    def total(self) -> int:
        """Bytes of all of it, had everything stayed in memory."""
        return self.parameters + self.gradients + self.state + self.activations

    def require(self, budget: int) -> None:
        """Refuse a budget that cannot hold the largest operator.

        Raises:
            BudgetError: naming the operator, what it needs and what there is.
        """
        need = self.largest.nbytes
        if budget < need:
            raise BudgetError(
                f"{self.largest.operator} of {self.largest.site or 'the root module'} "
                f"({self.largest.phase.value}) needs {format_bytes(need)} ({need} bytes) in fast "
                f"memory at once, but the budget is {format_bytes(budget)} ({budget} bytes): raise "
                "it to at least that plus the runtime's reserve, or make the operator smaller"
            )


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
    largest = WorkingSet("", "", Phase.FORWARD, -1)
    updated: dict[int, None] = {}
    for operator in trace.operators:
        touched = dict.fromkeys((*operator.reads, *operator.writes))
        if operator.phase is Phase.OPTIMIZER:
            updated |= touched
            continue
        nbytes = sum(
            trace.regions[index].nbytes
            for index in touched
            if index in saved or trace.regions[index].kind not in ("activation", "input")
        )
        if nbytes > largest.nbytes:
            largest = WorkingSet(operator.name, operator.site, operator.phase, nbytes)
    name, nbytes = _largest_update(trace.regions[index] for index in updated)
    if nbytes > largest.nbytes:
        largest = WorkingSet("the optimizer's update", name, Phase.OPTIMIZER, nbytes)
    totals: dict[str, int] = defaultdict(int)
    for region in trace.regions:
        totals[region.kind] += region.nbytes
    return Footprint(
        parameters=totals["parameter"] + totals["buffer"],
        gradients=totals["gradient"],
        state=totals["state"],
        activations=_peak(trace, saved),
        largest=largest,
    )


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


def _largest_update(regions: Iterable[RegionInfo]) -> tuple[str, int]:
    """Return the parameter whose regions are the most bytes among ``regions``, and those bytes."""
    sizes: dict[str, int] = defaultdict(int)
    for region in regions:
        if owner_of(region) is not None:
            sizes[region.name.partition(":")[0]] += region.nbytes
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


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
