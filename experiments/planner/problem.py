"""What a timed plan is made for: a step, a budget, a link, and what may be recomputed.

[Note: the model]  Search, exact optimum and checker share this model of time and memory.

* *Slots.* Uses run one after the other, each in a slot of its own for its seconds. A module call
  that is recomputed gets one more slot, right before the first use of anything it makes.
  Before every slot there may be a *pause*, in which nothing is computed.
* *Link.* Transfers take turns on one link: bytes divided by the bandwidth of their direction. A
  transfer may be cut into pieces and others run in between. In a slot transfers run beside compute
  and take at most the seconds of the slot; what they hide there costs nothing. In a pause they are
  exposed: the step takes so much longer. There is no latency.
* *Room.* A region takes all its bytes, in whole slots: from the slot in which the first piece of it
  is read, or in which it is created, up to and including the one before it is released. What is
  resident during a slot never passes the capacity. In a pause writes end, releases follow, then
  reads begin, so a pause needs no more than the slots beside it.
* *Use.* During its slot all regions of a use are resident and wholly there.
* *Writes.* A region is released free of charge if the tier below has its present content, or if
  nobody wants that content again. Else the content is written first, once, in any slots from after
  the use that modified it on. What exists before the step and what is not freed at its end must
  survive it; what is dirty and resident at the end may stay so.
* *Recompute.* Recomputing a module call takes the seconds of its forward. During its slot are
  resident what it reads from outside, all that it makes for backward, and its temporaries, counted
  as the most that forward held at one time. What it makes was dropped after its last use in the
  call. What it reads lives on until then.

The objective is the seconds of the step: uses, recomputation and pauses.

[Note: may be recomputed]  A call may be recomputed if it gives the same result again and changes
nothing outside: it writes only what it created, what it read is not written or freed before it is
recomputed, and something that it made waits for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dynoffload.planning.schedule import Use, infeasible


@dataclass(frozen=True)
class Again:
    """A call of a module in forward that may be recomputed.

    Attributes:
        name: of the call.
        start: first use of the call.
        stop: one past its last use.
        before: the use before which it is recomputed: the first that wants something it made.
        inputs: regions that it reads and did not make.
        makes: regions that it made and that nothing but ``before`` and later uses wants.
        scratch: most bytes of all else that it made and held at one time.
        seconds: what its uses take.
    """

    name: str
    start: int
    stop: int
    before: int
    inputs: tuple[int, ...]
    makes: tuple[int, ...]
    scratch: int
    seconds: float

    def overlaps(self, other: Again) -> bool:
        """Whether both share a use; of such calls at most one is recomputed."""
        return self.start < other.stop and other.start < self.stop


@dataclass
class Life:
    """One region from its creation, or the start of the step, to its end.

    Attributes:
        region: its index.
        born: whether a use of the step creates it; else it is there from the start.
        slots: at which it is touched, ascending.
        modifies: whether each touch modifies it.
        survives: whether it must outlive the step.
        again: ``(number, slot, makes)`` of calls that, recomputed in ``slot``, read it or make it
            anew; by slot.
    """

    region: int
    born: bool
    slots: list[int] = field(default_factory=list)
    modifies: list[bool] = field(default_factory=list)
    survives: bool = True
    again: list[tuple[int, int, bool]] = field(default_factory=list)


@dataclass(frozen=True)
class Problem:
    """A step to be planned; see [Note: the model].

    Attributes:
        uses: in order.
        sizes: bytes of each region.
        capacity: bytes of fast memory.
        read_bps: bytes per second into it.
        write_bps: bytes per second out of it.
        resident: regions in fast memory before the first use; what else is not created by the step
            is in the tier below.
        dirty: those of them whose copy below is stale.
        again: calls that may be recomputed.

    Raises:
        BudgetError: the regions of one use are together larger than ``capacity``.
    """

    uses: tuple[Use, ...]
    sizes: tuple[int, ...]
    capacity: int
    read_bps: float
    write_bps: float
    resident: frozenset[int] = frozenset()
    dirty: frozenset[int] = frozenset()
    again: tuple[Again, ...] = ()
    slot_of_use: tuple[int, ...] = field(init=False, repr=False, compare=False)
    slot_of_again: tuple[int, ...] = field(init=False, repr=False, compare=False)
    lives: tuple[Life, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_position: dict[int, list[int]] = {}
        for number, call in enumerate(self.again):
            by_position.setdefault(call.before, []).append(number)
        uses, calls, slot = [], [0] * len(self.again), 0
        for position in range(len(self.uses)):
            for number in by_position.get(position, ()):
                calls[number] = slot
                slot += 1
            uses.append(slot)
            slot += 1
        object.__setattr__(self, "slot_of_use", tuple(uses))
        object.__setattr__(self, "slot_of_again", tuple(calls))
        object.__setattr__(self, "lives", tuple(_lives(self)))

    @property
    def slots(self) -> int:
        """How many slots there are, of calls that may be recomputed too."""
        return len(self.uses) + len(self.again)

    @property
    def compute_s(self) -> float:
        """Seconds of the uses themselves."""
        return sum(use.seconds for use in self.uses)


def _lives(problem: Problem) -> list[Life]:
    sizes, slots = problem.sizes, problem.slot_of_use
    lives: list[Life] = []
    current: dict[int, Life] = {}
    calls = sorted(range(len(problem.again)), key=lambda n: problem.again[n].start)
    pending = list(reversed(calls))
    open_calls: dict[int, dict[int, Life]] = {}  # call -> the lives that it touches
    for region in sorted(problem.resident):
        current[region] = Life(region, born=False)
        lives.append(current[region])
    for position, use in enumerate(problem.uses):
        slot = slots[position]
        touched = dict.fromkeys((*use.regions, *use.creates))
        need = sum(sizes[region] for region in touched)
        if need > problem.capacity:
            raise infeasible(position, need, problem.capacity)
        creates, writes = use.creates, use.writes
        for region in touched:
            if region in creates:
                if region in current:
                    current[region].survives = False
                life = current[region] = Life(region, born=True)
                lives.append(life)
            else:
                found = current.get(region)
                if found is None:
                    found = current[region] = Life(region, born=False)
                    lives.append(found)
                life = found
            life.slots.append(slot)
            life.modifies.append(region in creates or region in writes)
        while pending and problem.again[pending[-1]].start == position:
            open_calls[pending.pop()] = {}
        for number, touching in list(open_calls.items()):
            touching.update((region, current[region]) for region in touched)
            if problem.again[number].stop == position + 1:
                _note(problem, number, open_calls.pop(number))
        for region in use.frees:
            if region in current:
                current.pop(region).survives = False
    for life in lives:
        life.again.sort(key=lambda again: again[1])
    return lives


def _note(problem: Problem, number: int, touching: Mapping[int, Life]) -> None:
    """Add a call to the lives that it touches."""
    call, slot = problem.again[number], problem.slot_of_again[number]
    for makes, regions in ((False, call.inputs), (True, call.makes)):
        for region in regions:
            touching[region].again.append((number, slot, makes))


def recomputable(
    uses: Sequence[Use],
    sizes: Sequence[int],
    calls: Iterable[tuple[str, int, int]],
    backward: int,
) -> tuple[Again, ...]:
    """Return those of ``calls`` that may be recomputed; see [Note: may be recomputed].

    Args:
        uses: of the step.
        sizes: bytes of each region.
        calls: name, first and one past the last use of calls of modules in forward.
        backward: the use with which backward begins.
    """
    touches: dict[int, list[int]] = {}
    modified: dict[int, list[int]] = {}
    for position, use in enumerate(uses):
        for region in dict.fromkeys((*use.regions, *use.creates)):
            touches.setdefault(region, []).append(position)
            if region in use.writes or region in use.creates:
                modified.setdefault(region, []).append(position)
    found = []
    spans: set[tuple[int, int]] = set()
    for name, start, stop in calls:
        if (start, stop) in spans or not 0 <= start < stop <= backward:
            continue
        spans.add((start, stop))
        call = _call(name, start, stop, uses, sizes, touches, modified, backward)
        if call is not None:
            found.append(call)
    return tuple(found)


def _call(
    name: str,
    start: int,
    stop: int,
    uses: Sequence[Use],
    sizes: Sequence[int],
    touches: dict[int, list[int]],
    modified: dict[int, list[int]],
    backward: int,
) -> Again | None:
    made: set[int] = set()
    inputs: dict[int, None] = {}
    freed: set[int] = set()
    for use in uses[start:stop]:
        for region in use.regions:
            if region not in made and region not in use.creates:
                inputs[region] = None
        if any(region in freed for region in use.creates):
            return None  # a name used twice within the call
        made.update(use.creates)
        if any(region not in made for region in use.writes):
            return None
        freed.update(use.frees)
    after = {
        region: _first(touches[region], stop, len(uses)) for region in made if region not in freed
    }
    makes = tuple(sorted(region for region, use in after.items() if backward <= use < len(uses)))
    if not makes or not any(sizes[region] for region in makes):
        return None
    before = min(after[region] for region in makes)
    for region in inputs:
        if any(start <= position < before for position in modified.get(region, ())):
            return None
    if any(_first(modified[region], stop, len(uses)) <= before for region in makes):
        return None  # made anew, or first modified, by who wants it
    wanted, alive, scratch = set(makes), 0, 0
    for use in uses[start:stop]:
        alive += sum(sizes[region] for region in use.creates if region not in wanted)
        scratch = max(scratch, alive)
        alive -= sum(sizes[r] for r in use.frees if r in made and r not in wanted)
    return Again(
        name=name,
        start=start,
        stop=stop,
        before=before,
        inputs=tuple(sorted(inputs)),
        makes=makes,
        scratch=scratch,
        seconds=sum(use.seconds for use in uses[start:stop]),
    )


def _first(positions: Sequence[int], at: int, none: int) -> int:
    return next((position for position in positions if position >= at), none)
