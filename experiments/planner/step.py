"""A step as recorded, in uses as coarse as wanted: operators, visits or blocks.

[Note: fused]  Uses that are fused need all their regions at once. What is created and freed within
is a temporary: all are one region, of the most bytes that they took at one time. Regions that
the fused uses touch, create, write and free alike are one region from then on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynoffload.experiments.planner.problem import Problem, recomputable
from dynoffload.planning.schedule import Use
from dynoffload.profiler.program import Program
from dynoffload.profiler.trace import Phase, Trace

_PERSISTENT = frozenset(("parameter", "buffer", "state"))


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        uses: in order.
        sizes: bytes of each region.
        spans: for each use, its operators in the trace, half-open.
        calls: name and operators of each module call of forward.
        backward: the use with which backward begins.
        visits: one past the last operator of each visit (see `dynoffload.profiler.resolve`).
    """

    uses: tuple[Use, ...]
    sizes: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    calls: tuple[tuple[str, int, int], ...]
    backward: int
    visits: tuple[int, ...]

    def on(self, capacity: int, bandwidth: float) -> Problem:
        """Return the problem of planning the step under ``capacity`` bytes, nothing resident."""
        return Problem(
            uses=self.uses,
            sizes=self.sizes,
            capacity=capacity,
            read_bps=bandwidth,
            write_bps=bandwidth,
            again=recomputable(self.uses, self.sizes, self.call_uses(), self.backward),
        )

    def call_uses(self) -> list[tuple[str, int, int]]:
        """Return name, first and one past the last use of each call.

        A call has all uses that it has operators of, with the glue around it that they contain.
        """
        begins = [start for start, _ in self.spans]
        found = []
        for name, start, stop in self.calls:
            if start < stop and begins:
                first = max(0, bisect_right(begins, start) - 1)
                found.append((name, first, bisect_right(begins, stop - 1)))
        return found

    def extent(self) -> tuple[int, int]:
        """See `extent`."""
        return extent(self.uses, self.sizes)

    def at_visits(self) -> Step:
        """Return the step with a use for each visit that touches data."""
        ends = [stop for _, stop in self.spans]
        stops = {bisect_right(ends, stop) for stop in self.visits} | {self.backward, len(ends)}
        return self.fused(sorted(stops - {0}))

    def fused(self, stops: Sequence[int]) -> Step:
        """Return the step with the uses up to each of ``stops`` made one; see [Note: fused].

        ``stops`` ascend to the number of uses and contain ``backward``.
        """
        uses: list[Use] = []
        spans = []
        sizes = list(self.sizes)
        born: set[int] = set()
        start = 0
        for stop in stops:
            uses.append(_fuse(self.uses[start:stop], sizes, born))
            spans.append((self.spans[start][0], self.spans[stop - 1][1]))
            start = stop
        merged, members = _merged(uses, sizes)
        return Step(
            uses=merged,
            sizes=tuple(sum(sizes[region] for region in group) for group in members),
            spans=tuple(spans),
            calls=self.calls,
            backward=sum(stop <= self.backward for stop in stops),
            visits=self.visits,
        )


def extent(uses: Sequence[Use], sizes: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of the largest use, and the most that is alive at one time."""
    created = {region for use in uses for region in use.creates}
    named = {region for use in uses for region in use.regions}
    alive = sum(sizes[region] for region in named - created)
    least, most = 0, alive
    for use in uses:
        least = max(least, sum(sizes[r] for r in {*use.regions, *use.creates}))
        alive += sum(sizes[region] for region in use.creates)
        most = max(most, alive)
        alive -= sum(sizes[region] for region in use.frees)
    return least, max(least, most)


def step_of(trace: Trace, program: Program) -> Step:
    """Return the step of a trace and its program, a use for each operator that touches data.

    The time of others is that of the next. What is made in the step ends with its last use, what
    comes from outside too; parameters, buffers and optimizer state do not end.
    """
    regions = trace.regions
    last: dict[int, int] = {}
    for number, operator in enumerate(trace.operators):
        for region in (*operator.reads, *operator.writes):
            last[region] = number
    ends: dict[int, list[int]] = {}
    for region, number in last.items():
        if regions[region].kind not in _PERSISTENT:
            ends.setdefault(number, []).append(region)
    there = {
        region for region, info in enumerate(regions) if info.kind in _PERSISTENT or info.born < 0
    }
    uses: list[Use] = []
    spans: list[tuple[int, int]] = []
    backward, seconds, begin = -1, 0.0, 0
    for number, operator in enumerate(trace.operators):
        if backward < 0 and operator.phase is not Phase.FORWARD:
            backward = len(uses)
        seconds += operator.seconds
        touched = tuple(dict.fromkeys((*operator.reads, *operator.writes)))
        if not touched:
            continue
        created = tuple(region for region in touched if region not in there)
        there.update(created)
        frees = tuple(ends.get(number, ()))
        uses.append(Use(touched, created, frees, seconds, operator.writes))
        spans.append((begin, number + 1))
        begin, seconds = number + 1, 0.0
    return Step(
        uses=tuple(uses),
        sizes=tuple(region.nbytes for region in regions),
        spans=tuple(spans),
        calls=tuple((call.path or "(root)", call.start, call.stop) for call in trace.calls),
        backward=len(uses) if backward < 0 else backward,
        visits=tuple(visit.operators[1] for visit in program.visits),
    )


def _fuse(uses: Sequence[Use], sizes: list[int], born: set[int]) -> Use:
    """Return ``uses`` as one; ``born`` are the regions that the step has created before.

    The temporaries are a new region, that is added to ``sizes``.
    """
    touched: dict[int, None] = {}
    created: set[int] = set()
    freed: set[int] = set()
    written: set[int] = set()
    for use in uses:
        touched.update(dict.fromkeys(use.regions))
        touched.update(dict.fromkeys(use.creates))
        created.update(use.creates)
        written.update(use.writes)
        freed.difference_update(use.creates)
        freed.update(use.frees)
    fresh = {region for region in created if region not in born}
    temporary = fresh & freed
    peak = alive = 0
    here: set[int] = set()
    for use in uses:
        for region in use.creates:
            if region in temporary and region not in here:
                here.add(region)
                alive += sizes[region]
        peak = max(peak, alive)
        for region in use.frees:
            if region in here:
                here.remove(region)
                alive -= sizes[region]
    born.update(fresh - temporary)
    born.difference_update(freed)
    regions = tuple(region for region in touched if region not in temporary)
    creates = tuple(region for region in regions if region in fresh)
    writes = (written | (created - fresh)) - temporary
    frees = tuple(sorted(freed - temporary))
    if peak:
        sizes.append(peak)
        temporaries = (len(sizes) - 1,)
        regions, creates = regions + temporaries, creates + temporaries
        frees += temporaries
    seconds = sum(use.seconds for use in uses)
    return Use(regions, creates, frees, seconds, tuple(sorted(writes)))


def _merged(uses: Sequence[Use], sizes: Sequence[int]) -> tuple[tuple[Use, ...], list[list[int]]]:
    """Return the uses with regions made one that they treat alike, and what each consists of."""
    history: dict[int, list[tuple[int, int]]] = {}
    for position, use in enumerate(uses):
        creates, frees, writes = set(use.creates), set(use.frees), set(use.writes)
        for region in dict.fromkeys((*use.regions, *use.frees)):
            how = (region in creates) + 2 * (region in writes) + 4 * (region in frees)
            history.setdefault(region, []).append((position, how))
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for region, events in history.items():
        if sizes[region]:
            groups.setdefault(tuple(events), []).append(region)
    members = list(groups.values())
    index = {region: place for place, group in enumerate(members) for region in group}

    def named(regions: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(index[region] for region in regions if region in index))

    merged = tuple(
        Use(
            named(use.regions), named(use.creates), named(use.frees), use.seconds, named(use.writes)
        )
        for use in uses
    )
    return merged, members
