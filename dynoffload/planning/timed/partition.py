"""Execution blocks of a step: cut at decision points, and between them where least is exposed.

What it is: `partition`, the choice of cuts for one step on one machine, and `decision_cuts`, which
finds in a program where a vocabulary says that samples decide. What it is not: the vocabulary's own
blocks, which are the same for all samples and are what a pilot predicts (see `planning.cutting`);
these refine them, and join what no sample parts.

[Note: least exposed]  While a block runs, what the next one lacks is fetched, and what it has done
with is written. So it exposes what these transfers take longer than its uses. What moves is what
does not stay under Belady's rule, use by use; a gap within a block is none. Long blocks even out
bursts; short ones fit: what a block uses and what the next one lacks must have room together, or
else the next one's fetches wait for the end of the block and are exposed. Dynamic programming over
pairs of neighbouring blocks finds the cuts that expose least, and among those the fewest, in
O(uses * lengths^2).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.planning.blocks import UNSEEN, Vocabulary
from dynoffload.planning.timed.choosing import Chooser
from dynoffload.planning.timed.plan import Plan
from dynoffload.planning.timed.planner import ALLOWANCE, plan
from dynoffload.planning.timed.problem import Problem
from dynoffload.planning.timed.step import Step
from dynoffload.profiler.program import Program, Visit

if TYPE_CHECKING:
    import numpy as np

    Seconds = np.ndarray[Any, np.dtype[np.float64]]

LENGTHS = (1, 2, 3, 4)
"""Visits that a block may have. Longer ones expose less by the rule above, and more once they are
planned, as all that a block uses is held for all of it: of 171 visits, blocks of up to 4 took 1% to
9% longer than visits did, blocks of up to 32 up to 20%."""
_CUT = 1e-7
"""What a cut costs, in seconds of the step: among partitions that expose alike the coarser."""


@dataclass(frozen=True)
class Partition:
    """Where a step is cut.

    Attributes:
        stops: one past the last use of each block, ascending.
        exposed_s: seconds that the blocks expose; see [Note: least exposed].
    """

    stops: tuple[int, ...]
    exposed_s: float


def partition(
    problem: Problem, cuts: Collection[int] = (), lengths: Sequence[int] = LENGTHS
) -> Partition:
    """Return the cuts of a step that expose least.

    Args:
        problem: the step, the budget and the link; what may be computed again does not matter.
        cuts: uses before which there must be a cut, such as `decision_cuts` and the beginning of
            backward.
        lengths: uses that a block may have; 1 must be among them.

    Raises:
        ConfigError: if 1 is not among the lengths.
    """
    import numpy as np

    if 1 not in lengths:
        raise ConfigError(f"blocks of one use must be allowed: lengths are {tuple(lengths)}")
    costs = BlockCosts(problem, max(lengths))
    count = len(problem.uses)
    sizes = np.array(sorted(set(lengths)))
    parted = np.zeros(count + 1, dtype=int)
    parted[[cut for cut in cuts if 0 < cut < count]] = 1
    before = np.cumsum(parted)  # cuts at or before a use
    penalty = _CUT * problem.compute_s
    # best[stop, kind]: what all up to `stop` exposes, less the last block, which has that length
    best = np.full((count + 1, len(sizes)), np.inf)
    came = np.zeros((count + 1, len(sizes)), dtype=int)
    for start in range(count):
        kinds = np.nonzero(start + sizes <= count)[0]
        stops = start + sizes[kinds]
        allowed = (before[stops - 1] == before[start]) & (
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
    found = float(np.min(ends)) - penalty * len(stops_found)
    return Partition(tuple(reversed(stops_found)), max(0.0, found))


def exposed(seconds: Any, write: Any, fetch: Any, fits: Any) -> Any:
    """Return the seconds that a block exposes beside which ``write`` and, if it ``fits``,
    ``fetch`` run; all of them arrays of seconds that can be broadcast."""
    import numpy as np

    together = np.maximum(0.0, write + fetch - seconds)
    return np.where(fits, together, np.maximum(0.0, write - seconds) + fetch)


def plan_blocks(
    step: Step,
    capacity: int,
    read_bps: float,
    write_bps: float,
    *,
    cuts: Collection[int] = (),
    lengths: Sequence[int] = LENGTHS,
    allowance: int = ALLOWANCE // 2,
) -> tuple[Step, Plan]:
    """Return a step in execution blocks, and its plan.

    Args:
        step: at visits.
        capacity: bytes of fast memory.
        read_bps: bytes per second into it.
        write_bps: bytes per second out of it.
        cuts: uses before which there must be a cut, as of `decision_cuts`.
        lengths: see `partition`.
        allowance: of the search, see `plan`.

    Raises:
        BudgetError: the regions of one use are together larger than ``capacity``.
    """
    whole = step.on(capacity, read_bps, write_bps)
    found = partition(whole, {*cuts, step.backward}, lengths)
    blocks = step.fused(found.stops)
    return blocks, plan(blocks.on(capacity, read_bps, write_bps), allowance=allowance)


class BlockCosts:
    """What each block of up to ``longest`` uses needs and moves, for all blocks at once.

    Attributes:
        need: ``[start, length - 1]``: bytes that a block uses.
        lack: ``[start, length - 1]``: bytes that it has to fetch.
        fetch: ``[start, length - 1]``: seconds of that.
        write: ``[stop, length - 1]``: seconds of writing what it has done with.
    """

    def __init__(self, problem: Problem, longest: int) -> None:
        import numpy as np

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
    import numpy as np

    found = np.zeros(shape)
    if not entries:
        return found
    at, before, amount = (np.array(column) for column in zip(*entries, strict=True))
    for distance in range(shape[1]):
        start = at - distance
        counts = (start > before) & (start >= 0)
        np.add.at(found[:, distance], start[counts], amount[counts])
    return np.cumsum(found, axis=1)


def decision_cuts(program: Program, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the visits of a program before which a sample decides, or a phase begins.

    That is where one of two neighbours belongs to a block that some sample does without, that one
    sample calls many times, or that is in no block.
    """
    block_of: dict[str, int] = {}
    for block in vocabulary.blocks:
        for path in block.visits:
            block_of.setdefault(path, block.index)

    def decides(visit: Visit) -> bool:
        index = block_of.get(visit.path, UNSEEN)
        if index == UNSEEN:
            return True
        block = vocabulary.blocks[index]
        return block.optional or block.path in vocabulary.repeated

    cuts = []
    for number in range(1, len(program.visits)):
        one, other = program.visits[number - 1], program.visits[number]
        same = block_of.get(one.path, UNSEEN) == block_of.get(other.path, UNSEEN)
        parted = decides(one) or decides(other)
        if one.phase is not other.phase or (parted and not (same and one.path == other.path)):
            cuts.append(number)
    return tuple(cuts)
