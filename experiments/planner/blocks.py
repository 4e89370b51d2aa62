"""Execution blocks of a step, cut where least is exposed.

[Note: least exposed]  While a block runs, what the next one lacks is fetched, and what it has done
with is written. So it exposes what these transfers take longer than its uses. What moves is what
does not stay under Belady's rule, use by use; a gap within a block is none. Long blocks even out
bursts; short ones fit: what a block uses and what the next one lacks must have room together, or
else the next one's fetches wait for the end of the block and are exposed. Dynamic programming over
pairs of neighbouring blocks finds the cuts that expose least, and among those the fewest, in
O(uses * lengths^2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dynoffload.experiments.planner.choosing import Chooser
from dynoffload.experiments.planner.plan import Plan
from dynoffload.experiments.planner.problem import Problem
from dynoffload.experiments.planner.search import ALLOWANCE, plan
from dynoffload.experiments.planner.step import Step

Seconds = np.ndarray[Any, np.dtype[np.float64]]

LENGTHS = (1, 2, 3, 4)
"""Visits that a block may have. Longer ones expose less by the rule above, and more once they are
planned, as all that a block uses is held for all of it: of 171 visits, blocks of up to 4 took 1% to
9% longer than visits did, blocks of up to 32 up to 20%."""
_CUT = 1e-7
"""What a cut costs, in seconds of the step: among partitions that expose alike the coarser."""


def partition(problem: Problem, backward: int, lengths: Sequence[int] = LENGTHS) -> tuple[int, ...]:
    """Return the stops of the blocks that expose least: one past the last use of each.

    Args:
        problem: the step, the budget and the link.
        backward: the use with which backward begins; no block reaches over it.
        lengths: uses that a block may have; 1 must be among them.
    """
    costs = BlockCosts(problem, max(lengths))
    count = len(problem.uses)
    sizes = np.array(sorted(set(lengths)))
    penalty = _CUT * problem.compute_s
    # best[stop, kind]: what all up to `stop` exposes, less the last block, which has that length
    best = np.full((count + 1, len(sizes)), np.inf)
    came = np.zeros((count + 1, len(sizes)), dtype=int)
    for start in range(count):
        kinds = np.nonzero(start + sizes <= count)[0]
        stops = start + sizes[kinds]
        allowed = ((start >= backward) | (stops <= backward)) & (
            costs.need[start, sizes[kinds] - 1] <= problem.capacity
        )
        allowed |= sizes[kinds] == 1
        kinds, stops = kinds[allowed], stops[allowed]
        fetch = costs.fetch[start, sizes[kinds] - 1]
        if start == 0:
            best[stops, kinds] = fetch + penalty
            continue
        last = np.nonzero(np.isfinite(best[start]))[0]
        begins = start - sizes[last]
        pair = exposed(
            costs.seconds(begins, start)[:, None],
            costs.write[start, sizes[last] - 1][:, None],
            fetch[None, :],
            costs.need[begins, sizes[last] - 1][:, None]
            + costs.lack[start, sizes[kinds] - 1][None, :]
            <= problem.capacity,
        )
        total = best[start, last][:, None] + pair
        choice = np.argmin(total, axis=0)
        best[stops, kinds] = total[choice, np.arange(len(kinds))] + penalty
        came[stops, kinds] = last[choice]
    ends = np.full(len(sizes), np.inf)
    for kind, size in enumerate(sizes):
        if size <= count and np.isfinite(best[count, kind]):
            left = costs.write[count, size - 1] - costs.seconds(count - size, count)
            ends[kind] = best[count, kind] + max(0.0, float(left))
    kind, stop = int(np.argmin(ends)), count
    stops_found = []
    while stop > 0:
        stops_found.append(stop)
        kind, stop = int(came[stop, kind]), stop - int(sizes[kind])
    return tuple(reversed(stops_found))


def exposed(seconds: Any, write: Any, fetch: Any, fits: Any) -> Any:
    """Return the seconds that a block exposes beside which ``write`` and, if it ``fits``,
    ``fetch`` run; all of them arrays of seconds that can be broadcast."""
    together = np.maximum(0.0, write + fetch - seconds)
    return np.where(fits, together, np.maximum(0.0, write - seconds) + fetch)


def plan_blocks(step: Step, capacity: int, bandwidth: float) -> tuple[Step, Plan]:
    """Return a step at visits in execution blocks, and its plan.

    Raises:
        BudgetError: the regions of one use are together larger than ``capacity``.
    """
    blocks = step.fused(partition(step.on(capacity, bandwidth), step.backward))
    return blocks, plan(blocks.on(capacity, bandwidth), allowance=ALLOWANCE // 2)


class BlockCosts:
    """What each block of up to ``longest`` uses needs and moves, for all blocks at once.

    Attributes:
        need: ``[start, length - 1]``: bytes that a block uses.
        lack: ``[start, length - 1]``: bytes that it has to fetch.
        fetch: ``[start, length - 1]``: seconds of that.
        write: ``[stop, length - 1]``: seconds of writing what it has done with.
    """

    def __init__(self, problem: Problem, longest: int) -> None:
        chooser = Chooser(problem)
        layout = chooser.layout(())
        moved = chooser.filled(layout, layout.absent, problem.capacity)
        assert moved is not None, "a use that does not fit is refused by the problem"
        use_of = {slot: use for use, slot in enumerate(problem.slot_of_use)}
        count = len(problem.uses)
        touches: list[tuple[int, int, float]] = []  # use, the use before it that touches it, bytes
        for life in problem.lives:
            previous = -1
            for slot in life.slots:
                use = use_of[slot]
                touches.append((use, previous, problem.sizes[life.region]))
                previous = use
        lacks, fetches, writes = [], [], []
        written: set[int] = set()
        for gap, moves in enumerate(moved):
            if not moves:
                continue
            before = use_of[layout.before[gap]] if layout.before[gap] >= 0 else -1
            after = use_of.get(layout.after[gap], count)
            if layout.fetch[gap]:
                lacks.append((after, before, float(layout.size[gap])))
                fetches.append((after, before, layout.read_s[gap]))
            content = layout.content[gap]
            if content >= 0 and content not in written and before >= 0:
                written.add(content)
                writes.append((count - 1 - before, count - 1 - after, layout.write_s[gap]))
        shape = (count + 1, longest)
        self.need = _sums(touches, shape)
        self.lack = _sums(lacks, shape)
        self.fetch = _sums(fetches, shape)
        mirrored = _sums(writes, shape)  # by the distance of the block's end from the string's
        self.write = np.zeros(shape)
        self.write[1:] = mirrored[count - 1 :: -1] if count else mirrored[:0]
        self._until = np.concatenate(([0.0], np.cumsum([use.seconds for use in problem.uses])))

    def seconds(self, start: Any, stop: Any) -> Any:
        """Return what the uses from ``start`` up to ``stop`` take."""
        return self._until[stop] - self._until[start]


def _sums(entries: Sequence[tuple[int, int, float]], shape: tuple[int, int]) -> Seconds:
    """Return for each block ``[start, length - 1]`` the sum of the entries that count in it.

    An entry ``(at, before, amount)`` counts in blocks that have ``at`` but not ``before``.
    """
    found = np.zeros(shape)
    if not entries:
        return found
    at, before, amount = (np.array(column) for column in zip(*entries, strict=True))
    for distance in range(shape[1]):
        start = at - distance
        counts = (start > before) & (start >= 0)
        np.add.at(found[:, distance], start[counts], amount[counts])
    return np.cumsum(found, axis=1)
