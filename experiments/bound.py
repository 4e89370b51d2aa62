"""Lower bound: no plan under a budget can run a step faster.

For each phase of a step, computes the fewest bytes that any plan must read and write, and from them
the least time. It treats phases independently and regions as divisible to the byte, so no plan need
reach it.

[Note: the fewest bytes of one phase]  At most the capacity is resident as the phase begins; the
plan may choose that content freely. Between two uses of a region, the second of which reads it,
each byte stays resident or is read again. Each modified byte stays until it is overwritten or freed
or the phase ends, or is written once. Both are intervals, of which as many as possible are kept in
the room that the regions in use leave. Dropping the one that ends last whenever too many overlap is
optimal (Faigle and Nawijn 1995; for paging Belady's rule, 1966). The two minima need not belong to
one plan.

[Note: the phases]  A parameter's update may be deferred to its next use, so forward and optimizer
are one phase, and backward is the other; with three phases the result would not be a bound. For
plans that update in backward, only the sum over the phases is a bound: `StepBound.spread_s`.

[Note: one link or two]  If simultaneous reads and writes were measured to be no faster than
alternating ones, the link is shared. A phase then takes at least its reads plus its writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from dynoffload.planning.schedule import Use, infeasible
from dynoffload.simulation.machine import Link

STATES_OF_ADAMW = 2
"""Tensors of a parameter's size in AdamW's state."""


@dataclass(frozen=True)
class PhaseBound:
    """Minimum cost of one phase.

    Attributes:
        compute_s: seconds of the uses themselves.
        bytes_in: bytes that any plan reads during the phase.
        bytes_out: bytes that any plan writes during the phase.
    """

    compute_s: float
    bytes_in: int
    bytes_out: int

    def seconds(self, read_bw: float, write_bw: float, *, shared_link: bool = False) -> float:
        """Return the least time of the phase at these bandwidths, in bytes per second.

        Reads and writes overlap; with ``shared_link`` they alternate.
        """
        reads, writes = self.bytes_in / read_bw, self.bytes_out / write_bw
        return max(self.compute_s, reads + writes if shared_link else max(reads, writes))


def phase_bound(uses: Sequence[Use], sizes: Sequence[int], capacity: int) -> PhaseBound:
    """Return the minimum cost of the phase that consists of ``uses``.

    Raises:
        BudgetError: if the regions of one use are together larger than ``capacity``.
    """
    pinned = [frozenset((*use.regions, *use.creates)) for use in uses]
    for position, regions in enumerate(pinned):
        need = sum(sizes[region] for region in regions)
        if need > capacity:
            raise infeasible(position, need, capacity)
    return PhaseBound(
        sum(use.seconds for use in uses),
        _fewest_dropped(_read_gaps(uses, pinned), pinned, sizes, capacity),
        _fewest_dropped(_unsaved_spans(uses, pinned), pinned, sizes, capacity),
    )


class _Interval(NamedTuple):
    """Positions ``start <= p < stop`` over which each byte of ``region`` is kept or moved once."""

    region: int
    start: int
    stop: int


def _read_gaps(uses: Sequence[Use], pinned: Sequence[frozenset[int]]) -> list[_Interval]:
    """Return the gaps that end in a read; those of first uses begin with the phase."""
    gaps = []
    last: dict[int, int] = {}
    for position, use in enumerate(uses):
        for region in pinned[position]:
            if region not in use.creates:
                gaps.append(_Interval(region, last.get(region, -1) + 1, position))
            last[region] = position
    return gaps


def _unsaved_spans(uses: Sequence[Use], pinned: Sequence[frozenset[int]]) -> list[_Interval]:
    """Return the spans over which modified bytes must stay resident or be written."""
    spans = []
    modified: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, use in enumerate(uses):
        for region in pinned[position]:
            made = modified.get(region)
            if made is not None and (region in use.writes or region in use.creates):
                needed = last[region] if region in use.creates else position
                spans.append(_Interval(region, made + 1, needed))
            if region in use.writes or region in use.creates:
                modified[region] = position
            last[region] = position
        for region in use.frees:
            made = modified.pop(region, None)
            if made is not None:
                spans.append(_Interval(region, made + 1, last[region]))
    end = len(uses) + 1  # to the end of the phase and beyond
    spans += [_Interval(region, made + 1, end) for region, made in modified.items()]
    return spans


def _fewest_dropped(
    intervals: Iterable[_Interval],
    pinned: Sequence[frozenset[int]],
    sizes: Sequence[int],
    capacity: int,
) -> int:
    """Return the fewest bytes of ``intervals`` that do not fit next to the regions in use."""
    length = len(pinned)
    starting: list[list[_Interval]] = [[] for _ in range(length + 1)]
    for interval in intervals:
        if interval.start < interval.stop:
            starting[interval.start].append(interval)
    ending: list[list[_Interval]] = [[] for _ in range(length + 2)]
    kept: dict[_Interval, int] = {}
    covered: dict[int, int] = {}  # region -> end of its interval
    farthest: list[tuple[int, _Interval]] = []
    total = dropped = 0
    for position in range(length + 1):
        for interval in ending[position]:
            total -= kept.pop(interval)
        for interval in starting[position]:
            covered[interval.region] = interval.stop
            kept[interval] = sizes[interval.region]
            total += sizes[interval.region]
            ending[interval.stop].append(interval)
            heappush(farthest, (-interval.stop, interval))
        in_use = pinned[position] if position < length else ()
        extra = sum(sizes[region] for region in in_use if covered.get(region, 0) <= position)
        while (excess := total + extra - capacity) > 0:
            interval = farthest[0][1]
            cut = min(excess, kept[interval])
            kept[interval] -= cut
            total -= cut
            dropped += cut
            if not kept[interval]:
                heappop(farthest)
    return dropped


@dataclass(frozen=True)
class StepVisit:
    """One call of a module with parameters: their names, and the bytes it saves for backward."""

    parameters: tuple[str, ...]
    saved_bytes: int


@dataclass(frozen=True)
class StepString:
    """The reference string of one step.

    Attributes:
        sizes: bytes of each region.
        forward: uses of forward, each with the pending updates of its parameters.
        backward: uses of backward.
    """

    sizes: tuple[int, ...]
    forward: tuple[Use, ...]
    backward: tuple[Use, ...]


@dataclass(frozen=True)
class StepBound:
    """The least time of a step, and its parts.

    Attributes:
        seconds: with the link as measured.
        overlapped_s: if reads and writes overlapped freely; never larger.
        spread_s: if traffic could move freely between the phases; never larger.
        forward: forward with the optimizer's updates.
        backward: backward.
    """

    seconds: float
    overlapped_s: float
    spread_s: float
    forward: PhaseBound
    backward: PhaseBound


def step_string(
    visits: Sequence[StepVisit],
    parameter_bytes: Mapping[str, int],
) -> StepString:
    """Return the string of a step that made ``visits``, where all steps are like it.

    Args:
        visits: in forward order.
        parameter_bytes: size of each parameter, by name.
    """
    sizes: list[int] = []
    weight: dict[str, int] = {}
    gradient: dict[str, int] = {}
    state: dict[str, int] = {}
    for name in dict.fromkeys(name for visit in visits for name in visit.parameters):
        for index, factor in ((weight, 1), (gradient, 1), (state, STATES_OF_ADAMW)):
            index[name] = len(sizes)
            sizes.append(factor * parameter_bytes[name])
    chunks = []
    for visit in visits:
        chunks.append(len(sizes))
        sizes.append(visit.saved_bytes)

    forward: list[Use] = []
    updated: set[str] = set()
    for visit, chunk in zip(visits, chunks, strict=True):
        fresh = [name for name in visit.parameters if name not in updated]
        updated.update(fresh)
        written = tuple(index[name] for name in fresh for index in (weight, state))
        gradients = tuple(gradient[name] for name in fresh)
        reads = dict.fromkeys((*(weight[n] for n in visit.parameters), *written, *gradients))
        forward.append(Use(tuple(reads), creates=(chunk,), frees=gradients, writes=written))

    backward: list[Use] = []
    made: set[str] = set()
    for visit, chunk in zip(reversed(visits), reversed(chunks), strict=True):
        fresh = [name for name in visit.parameters if name not in made]
        again = tuple(gradient[name] for name in visit.parameters if name in made)
        made.update(fresh)
        regions = (*(weight[name] for name in visit.parameters), *again, chunk)
        creates = tuple(gradient[name] for name in fresh)
        backward.append(Use(regions, creates=creates, frees=(chunk,), writes=again))
    return StepString(tuple(sizes), tuple(forward), tuple(backward))


def step_bound(
    string: StepString,
    budget: int,
    link: Link,
    forward_s: float,
    backward_s: float,
) -> StepBound:
    """Return the bound of ``string`` under ``budget`` bytes.

    Args:
        string: of the step.
        budget: bytes of fast memory.
        link: to the file tier.
        forward_s: seconds that forward and optimizer compute, measured without a budget.
        backward_s: seconds that backward computes.

    Raises:
        BudgetError: one use alone is larger than the budget.
    """
    phases = []
    for uses, seconds in ((string.forward, forward_s), (string.backward, backward_s)):
        timed = [replace(uses[0], seconds=seconds), *uses[1:]] if uses else []
        phases.append(phase_bound(timed, string.sizes, budget))
    reads, writes = link.read_bps, link.write_bps
    overlapped = sum(phase.seconds(reads, writes) for phase in phases)
    actual = sum(phase.seconds(reads, writes, shared_link=link.in_turns) for phase in phases)
    whole = PhaseBound(
        sum(phase.compute_s for phase in phases),
        sum(phase.bytes_in for phase in phases),
        sum(phase.bytes_out for phase in phases),
    )
    spread = whole.seconds(reads, writes, shared_link=link.in_turns)
    return StepBound(actual, overlapped, spread, phases[0], phases[1])
