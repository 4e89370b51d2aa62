"""The order template: the structure shared by the orders of all samples.

`OrderTemplate` merges every occurrence of a block in any sample into one canonical sequence of
slots, and marks runs of blocks that repeat a varying number of times (such as one cell per tree
node) as loops. Loops do not nest; unknown blocks are skipped.

A slot is ``(block, occurrence)`` or ``(LOOP - family, run)``: a block that always runs twice has
two slots, and a family of looping blocks with two separate runs has two loops.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.planning.blocks import Block

MAX_SLOTS = 8192
"""The most slots of a template; ordering them takes four bytes for each pair."""
_ROWS = 512  # slots whose followers are counted at once
LOOP = -2
"""The first code that names a family of looping blocks, in place of a block's index."""

Slot = tuple[int, int]
Order = Sequence[int]


@dataclass(frozen=True)
class OrderTemplate:
    """The canonical sequence of slots of one network.

    Attributes:
        slots: every slot, in canonical order.
        families: the looping blocks of each family; family ``f`` is coded ``LOOP - f``.
    """

    slots: tuple[Slot, ...]
    families: tuple[frozenset[int], ...] = ()

    @cached_property
    def blocks(self) -> npt.NDArray[np.int64]:
        """The block of each slot, or a family's code, ``[slots]``."""
        return np.array([slot[0] for slot in self.slots], dtype=np.int64)

    @cached_property
    def single(self) -> npt.NDArray[np.int64]:
        """Indices of the slots that hold one block, ascending."""
        return np.flatnonzero(self.blocks >= 0)

    @cached_property
    def loops(self) -> tuple[int, ...]:
        """Indices of the slots that hold a run of looping blocks, ascending."""
        return tuple(np.flatnonzero(self.blocks <= LOOP).tolist())

    @cached_property
    def place_of(self) -> dict[Slot, int]:
        """The index of each slot."""
        return {slot: place for place, slot in enumerate(self.slots)}

    @cached_property
    def number_of(self) -> dict[Slot, int]:
        """The number of each slot of one block among these."""
        return {self.slots[place]: number for number, place in enumerate(self.single.tolist())}

    @cached_property
    def family_of(self) -> dict[int, int]:
        """The family of each looping block."""
        return {b: number for number, members in enumerate(self.families) for b in members}


def learn_template(
    orders: Sequence[Order], blocks: Sequence[Block], unrolled: frozenset[int] = frozenset()
) -> OrderTemplate:
    """Learn the template of a network from the block orders of its samples.

    Blocks that no sample ran have a slot each, after that of the block before them in the
    vocabulary.

    Args:
        orders: one list of block indices per sample; negative ones (unseen blocks) are skipped.
        blocks: the vocabulary's blocks, whose paths break ties.
        unrolled: looping blocks that get a slot for each occurrence, and no loop.

    Raises:
        PilotError: if there are more than `MAX_SLOTS`.
    """
    families = tuple(f for f in _families(orders, blocks) if not f & unrolled)
    filled = [tokens(order, families) for order in orders]
    slots = _canonical([list(slots) for slots in filled], blocks, families)
    return OrderTemplate(tuple(_with_unseen(slots, families, len(blocks))), families)


def _with_unseen(
    slots: Sequence[Slot], families: tuple[frozenset[int], ...], blocks: int
) -> list[Slot]:
    """Return ``slots`` with one more for each block that has none."""
    there = {block for block, _ in slots}.union(*families)
    after: dict[int, list[Slot]] = defaultdict(list)  # block, -1 for the begin -> slots after it
    before, first = -1, set(slots)
    for block in range(blocks):
        if block not in there:
            after[before].append((block, 0))
        elif (block, 0) in first:
            before = block
    made = after[-1]
    for slot in slots:
        made.append(slot)
        made += after[slot[0]] if slot[1] == 0 and slot[0] >= 0 else ()
    return made


def tokens(order: Order, families: tuple[frozenset[int], ...]) -> dict[Slot, tuple[int, ...]]:
    """Return the slots an order fills, in the order's sequence, with the blocks in each."""
    home = {block: family for family, members in enumerate(families) for block in members}
    seen: Counter[int] = Counter()
    result: dict[Slot, tuple[int, ...]] = {}
    for family, group in groupby(order, key=lambda block: home.get(block, -1)):
        blocks = [block for block in group if block >= 0]
        runs = [(LOOP - family, blocks)] if family >= 0 else [(b, [b]) for b in blocks]
        for code, run in runs:
            result[code, seen[code]] = tuple(run)
            seen[code] += 1
    return result


def _families(orders: Sequence[Order], blocks: Sequence[Block]) -> tuple[frozenset[int], ...]:
    """Return the looping blocks, grouped into families by adjacency.

    A path loops if some sample calls it more than once and samples differ in how often. A block
    that only some samples have and that always stands between looping blocks belongs to the loop.
    Blocks form a family if each leads to the other (a strongly connected component) or if they
    share a path. Of two consecutive loops, the second never leads back to the first.
    """
    counts: dict[str, set[int]] = {}
    for order in orders:
        for path, count in Counter(blocks[b].path for b in order if b >= 0).items():
            counts.setdefault(path, set()).add(count)
    loops = {path for path, seen in counts.items() if max(seen) > 1 and len(seen) > 1}
    if not loops:
        return ()
    from scipy.sparse.csgraph import connected_components

    looping = {b.index for b in blocks if b.path in loops}
    presence = Counter(block for order in orders for block in set(order) if block >= 0)
    while True:
        outside: set[int] = set()
        inside: set[int] = set()
        for order in orders:
            for before, block, after in zip((-1, *order), order, (*order[1:], -1), strict=False):
                if block >= 0 and block not in looping and presence[block] < len(orders):
                    enclosed = before in looping and after in looping
                    (inside if enclosed else outside).add(block)
        if not inside - outside:
            break
        looping |= inside - outside
    leads = np.zeros((len(blocks), len(blocks)), dtype=np.bool_)
    for order in orders:
        for left, right in pairwise(order):
            if left in looping and right in looping:
                leads[left, right] = True
    first_of: dict[str, int] = {}
    for block in sorted(looping):
        first = first_of.setdefault(blocks[block].path, block)
        leads[first, block] = leads[block, first] = True
    _, home = connected_components(leads, connection="strong")
    groups: dict[int, set[int]] = {}
    for block in looping:
        groups.setdefault(int(home[block]), set()).add(block)
    return tuple(frozenset(group) for group in sorted(groups.values(), key=min))


def _canonical(
    sequences: list[list[Slot]], blocks: Sequence[Block], families: tuple[frozenset[int], ...]
) -> list[Slot]:
    """Return all slots in an order that contradicts few samples.

    Kahn's algorithm on "mostly runs before". In a cycle, the slot with the least weight of unplaced
    predecessors goes first. Slots that never occur together are ordered by path and number.
    """
    slots = sorted({slot for sequence in sequences for slot in sequence})
    if len(slots) > MAX_SLOTS:
        raise PilotError(
            f"the recorded orders have {len(slots)} places for blocks, and a pilot takes at most "
            f"{MAX_SLOTS}: name a larger budget, which cuts the network into fewer blocks, or "
            "record shorter samples"
        )
    number = {slot: i for i, slot in enumerate(slots)}
    before = np.zeros((len(slots), len(slots)), dtype=np.int32)
    for sequence in sequences:
        places = np.array([number[slot] for slot in sequence], dtype=np.int64)
        for start in range(0, places.size, _ROWS):
            rows = places[start : start + _ROWS]
            later = np.triu(np.ones((rows.size, places.size), dtype=np.int32), start + 1)
            before[np.ix_(rows, places)] += later
    weight = before - before.T
    del before
    edges = weight > 0
    np.maximum(weight, 0, out=weight)

    def rank(slot: Slot) -> tuple[object, ...]:
        block = slot[0] if slot[0] >= 0 else min(families[LOOP - slot[0]])
        parts = re.split(r"(\d+)", blocks[block].path)
        natural = tuple((int(p), "") if i % 2 else (-1, p) for i, p in enumerate(parts))
        return (natural, block, slot[1])

    ranks = {number[slot]: rank(slot) for slot in slots}
    degree = edges.sum(axis=0)
    left = np.ones(len(slots), dtype=bool)
    ready = [(ranks[i], i) for i in range(len(slots)) if degree[i] == 0]
    heapq.heapify(ready)
    result: list[Slot] = []
    while len(result) < len(slots):
        if ready:
            node = heapq.heappop(ready)[1]
        else:
            debt = np.where(left, weight[left].sum(axis=0), np.iinfo(np.int64).max)
            node = min(np.flatnonzero(debt == debt.min()).tolist(), key=ranks.__getitem__)
        if not left[node]:
            continue
        left[node] = False
        result.append(slots[node])
        for follower in np.flatnonzero(edges[node] & left).tolist():
            degree[follower] -= 1
            if degree[follower] == 0:
                heapq.heappush(ready, (ranks[follower], follower))
    return result
