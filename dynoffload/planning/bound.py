"""The bound: no plan under this capacity runs the string faster.

What it is: for each phase of a step, the fewest bytes that any plan must read and write during that
phase, and from them the least time. What it is not: a plan, or reachable in every case; it takes
each phase by itself and a region as divisible to the byte.

[Note: The fewest bytes of one phase]
Cut a phase out of a string. Whatever a plan did before it, at most C bytes are resident at its
start; let the plan choose them freely.

*Reads.* Between two uses of a region, the second of which reads it, each of its bytes either stays
resident or is read again; likewise between the start of the phase and a first use that reads. Such
a gap may be kept at a position only in the room that the regions in use there leave. Letting bytes
of one region go different ways only widens the choice, and makes the problem one of keeping as many
unit intervals as fit. Sweeping forward and dropping the interval that ends last whenever too many
overlap is optimal for it (Faigle and Nawijn 1995; for paging this is Belady's rule, 1966), also
where the room changes with the position: the dropped one relieves at least as many positions.

*Writes.* Bytes modified or created in the phase must either stay resident until they are modified
again, overwritten, freed or the phase is over, or be written once in between (what nobody reads
before it is created anew or freed needs neither). These again are intervals, none of which overlaps
another of its region, and at each position those kept share C with the regions in use that no such
interval covers. The same sweep drops the fewest bytes. What was dirty when the phase began counts
for the phase that made it so.

The two minima need not belong to one plan; each holds by itself for every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from dynoffload.errors import ConfigError
from dynoffload.planning.schedule import Use, infeasible


@dataclass(frozen=True)
class PhaseBound:
    """What one phase costs at least.

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

        Reads and writes are taken to overlap; with ``shared_link`` they take turns.
        """
        reads, writes = self.bytes_in / read_bw, self.bytes_out / write_bw
        return max(self.compute_s, reads + writes if shared_link else max(reads, writes))


def bound(
    uses: Sequence[Use],
    sizes: Sequence[int],
    capacity: int,
    read_bw: float,
    write_bw: float,
    phases: Iterable[tuple[int, int]],
    *,
    shared_link: bool = False,
) -> float:
    """Return the seconds below which no plan runs ``uses``: the sum of its phases' least times.

    Args:
        uses: the reference string, with the seconds of each use.
        sizes: bytes of each region.
        capacity: bytes of fast memory.
        read_bw: bytes per second from the lower tier.
        write_bw: bytes per second to the lower tier.
        phases: half-open ranges of positions, such as forward, backward and optimizer; phases that
            overlap would count work twice and are refused.
        shared_link: whether reads and writes take turns on one link.

    Raises:
        BudgetError: if the regions of one use are together larger than ``capacity``.
        ConfigError: if a bandwidth is not positive or the phases are not ranges in order.
    """
    if not (read_bw > 0 and write_bw > 0):
        raise ConfigError(f"bandwidths must be above 0 bytes/s: read {read_bw}, write {write_bw}")
    total, reached = 0.0, 0
    for start, stop in phases:
        if not reached <= start <= stop <= len(uses):
            raise ConfigError(
                f"phase {(start, stop)} is not a range of the {len(uses)} uses after position "
                f"{reached}: give half-open ranges in order, without overlap"
            )
        reached = stop
        least = phase_bound(uses[start:stop], sizes, capacity, first=start)
        total += least.seconds(read_bw, write_bw, shared_link=shared_link)
    return total


def phase_bound(
    uses: Sequence[Use], sizes: Sequence[int], capacity: int, *, first: int = 0
) -> PhaseBound:
    """Return what the phase that consists of ``uses`` costs at least.

    ``first`` is the position of the phase in its string, for the error of a use that cannot run.

    Raises:
        BudgetError: if the regions of one use are together larger than ``capacity``.
    """
    pinned = [frozenset((*use.regions, *use.creates)) for use in uses]
    for position, regions in enumerate(pinned):
        need = sum(sizes[region] for region in regions)
        if need > capacity:
            raise infeasible(first + position, need, capacity)
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
    """Return the gaps that end in a read, from the start of the phase for a first use."""
    gaps = []
    last: dict[int, int] = {}
    for position, use in enumerate(uses):
        for region in pinned[position]:
            if region not in use.creates:
                gaps.append(_Interval(region, last.get(region, -1) + 1, position))
            last[region] = position
    return gaps


def _unsaved_spans(uses: Sequence[Use], pinned: Sequence[frozenset[int]]) -> list[_Interval]:
    """Return where modified bytes must either stay resident or have been written."""
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
    end = len(uses) + 1  # to the end of the phase and over it
    spans += [_Interval(region, made + 1, end) for region, made in modified.items()]
    return spans


def _fewest_dropped(
    intervals: Iterable[_Interval],
    pinned: Sequence[frozenset[int]],
    sizes: Sequence[int],
    capacity: int,
) -> int:
    """Return the fewest bytes of ``intervals`` that cannot be kept beside what is in use."""
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
        beside = sum(sizes[region] for region in in_use if covered.get(region, 0) <= position)
        while (excess := total + beside - capacity) > 0:
            interval = farthest[0][1]
            cut = min(excess, kept[interval])
            kept[interval] -= cut
            total -= cut
            dropped += cut
            if not kept[interval]:
                heappop(farthest)
    return dropped
