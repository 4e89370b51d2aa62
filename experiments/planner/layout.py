"""The slots of a step for one choice of recomputed calls, and the gaps between touches.

In a *gap* between two touches a region is not needed; it is kept there, or moved out and in.

[Note: contents]  A content of a region begins with the touch that modifies it and ends with the
next one that does. Whichever of its gaps are moved, it is written once, before the first of them.
"""

from __future__ import annotations

from collections.abc import Collection

from dynoffload.experiments.planner.problem import Life, Problem


class Layout:
    """Slots and gaps for one choice of calls that are recomputed.

    Attributes:
        problem: what it is of.
        active: numbers of the calls that are recomputed.
        seconds: of each slot; 0 for calls that are not recomputed.
        need: bytes that each slot touches.
        region: of each gap.
        before: the slot of the touch before each gap; -1 if it begins with the step.
        after: the slot of the touch after it; the number of slots if it ends with the step.
        size: bytes of its region.
        fetch: whether the region must be back at ``after``.
        absent: whether the region is not there to begin with, so that the gap is moved in any case.
        content: of each gap, its content; -1 if the tier below has it.
        begins: for each content, the slot that modified it; -1 if that was before the step.
        gaps_of: for each content, its gaps in order.
        read_s, write_s: seconds of each gap's region on the link.
        again_s: seconds of what is recomputed.
    """

    def __init__(self, problem: Problem, active: Collection[int] = ()) -> None:
        self.problem = problem
        self.active = frozenset(active)
        self.slots = problem.slots
        seconds = [0.0] * problem.slots
        for use, slot in zip(problem.uses, problem.slot_of_use, strict=True):
            seconds[slot] = use.seconds
        need = [0] * problem.slots
        for number in self.active:
            call, slot = problem.again[number], problem.slot_of_again[number]
            seconds[slot] = call.seconds
            need[slot] = call.scratch
        self.seconds = seconds
        self.again_s = sum(problem.again[number].seconds for number in self.active)
        self.need = need
        self.region: list[int] = []
        self.before: list[int] = []
        self.after: list[int] = []
        self.size: list[int] = []
        self.fetch: list[bool] = []
        self.absent: list[bool] = []
        self.content: list[int] = []
        self.begins: list[int] = []
        self.gaps_of: list[list[int]] = []
        for life in problem.lives:
            self._lay(life)
        sizes = self.size
        self.read_s = [size / problem.read_bps for size in sizes]
        self.write_s = [size / problem.write_bps for size in sizes]

    @property
    def feasible(self) -> bool:
        """Whether every slot by itself fits; a call that is recomputed may not."""
        return max(self.need, default=0) <= self.problem.capacity

    def __len__(self) -> int:
        return len(self.region)

    def _lay(self, life: Life) -> None:
        """Add the gaps of a life."""
        again = [entry for entry in life.again if entry[0] in self.active]
        if not again:
            self._run(life.region, life.slots, life.modifies, life.born, life.survives)
            return
        slots, modifies = list(life.slots), list(life.modifies)
        made = -1
        for _, slot, makes in again:
            place = sum(other < slot for other in slots)
            slots.insert(place, slot)
            modifies.insert(place, makes)
            if makes:
                made = place
        if made >= 0:
            self._run(life.region, slots[:made], modifies[:made], life.born, survives=False)
            self._run(life.region, slots[made:], modifies[made:], True, life.survives)
        else:
            self._run(life.region, slots, modifies, life.born, life.survives)

    def _run(
        self, region: int, slots: list[int], modifies: list[bool], born: bool, survives: bool
    ) -> None:
        """Add the touches and gaps of a region that is there from the first to the last touch."""
        size, need = self.problem.sizes[region], self.need
        for slot in slots:
            need[slot] += size
        if not size:
            return
        content = -1
        if not born:
            here = region in self.problem.resident
            if region in self.problem.dirty:
                content = self._new(-1)
            first = slots[0] if slots else self.slots
            if slots or survives:
                self._gap(region, -1, first, bool(slots), not here, content)
        for place, slot in enumerate(slots):
            if modifies[place]:
                content = self._new(slot)
            if place + 1 < len(slots):
                self._gap(region, slot, slots[place + 1], True, False, content)
            elif survives:
                self._gap(region, slot, self.slots, False, False, content)

    def _new(self, slot: int) -> int:
        self.begins.append(slot)
        self.gaps_of.append([])
        return len(self.begins) - 1

    def _gap(
        self, region: int, before: int, after: int, fetch: bool, absent: bool, content: int
    ) -> None:
        if after - before < 2 and not absent:
            return  # no slot between
        if content >= 0:
            self.gaps_of[content].append(len(self.region))
        self.region.append(region)
        self.before.append(before)
        self.after.append(after)
        self.size.append(self.problem.sizes[region])
        self.fetch.append(fetch)
        self.absent.append(absent)
        self.content.append(content)
