"""A plan: what is computed again, what moves in which slots, and the seconds of the step.

What it is: `Plan`, made of a `Choice` by `plan_of`. What it is not: the search (see `planner`),
nor the proof that it holds (see `check`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

from dynoffload.errors import BudgetError
from dynoffload.planning.schedule import Action, Kind, NextUse, Schedule, Use
from dynoffload.planning.timed.choosing import Choice
from dynoffload.planning.timed.problem import Problem


class Decision(Enum):
    """What is done with a region after a touch, until the next."""

    KEEP = "keep"
    """It stays in fast memory."""
    OFFLOAD = "offload"
    """It leaves, and is fetched before its next use if there is one."""
    RECOMPUTE = "recompute"
    """It is dropped and made again."""


@dataclass(frozen=True)
class Transfer:
    """One region on the link, once.

    Attributes:
        region: its index.
        kind: the direction.
        first: the first slot in which it may run. From it on a fetched region takes room.
        last: one past the last slot in which it may run. A written region takes room up to it; a
            fetched one is used in it.
        pieces: ``(slot, seconds)`` of what runs beside compute.
        exposed_s: seconds of the rest, in the pause before ``last``.
    """

    region: int
    kind: Kind
    first: int
    last: int
    pieces: tuple[tuple[int, float], ...]
    exposed_s: float


@dataclass(frozen=True)
class Stay:
    """Slots ``first`` to ``last - 1`` in which a region takes room."""

    region: int
    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """How a step is to run; see [Note: the model] of `problem`.

    Attributes:
        problem: what it is a plan of.
        again: numbers of the calls that are computed again.
        transfers: by their first slot.
        stays: where regions take room.
        decisions: ``(region, slot of the touch, decision)`` for each gap between two touches that
            are not neighbours, and for each region that is made again.
        seconds: of the step.
        compute_s: of its uses.
        again_s: of what is computed again.
        exposed_s: of transfers in pauses.
    """

    problem: Problem
    again: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    stays: tuple[Stay, ...]
    decisions: tuple[tuple[int, int, Decision], ...]
    seconds: float
    compute_s: float
    again_s: float
    exposed_s: float

    def pauses(self) -> list[float]:
        """Return the seconds of the pause before each slot, and of the one at the end."""
        waits = [0.0] * (self.problem.slots + 1)
        for transfer in self.transfers:
            waits[transfer.last] += transfer.exposed_s
        return waits

    def string(self) -> tuple[tuple[Use, ...], tuple[int, ...]]:
        """Return the uses of the step as planned, and the sizes of the regions that they name.

        Each call that is computed again is one use. Its temporaries are one region, beyond those of
        the problem, in the order of ``again``. What does not survive the step is freed with its
        last use; what is made again, with its last use before that too.
        """
        return _expanded(self)[0], (
            *self.problem.sizes,
            *(self.problem.again[number].scratch for number in self.again),
        )

    def schedule(self) -> Schedule:
        """Return the transfers as a schedule of `string`, for whoever carries out schedules.

        A fetch begins at its first slot, an eviction where its region's room ends.
        """
        uses, positions = _expanded(self)
        sizes = self.problem.sizes
        comes = {(stay.region, stay.first) for stay in self.stays}
        actions = [
            Action(0, Kind.EVICT, region)
            for region in sorted(self.problem.resident)
            if (region, 0) not in comes and sizes[region]
        ]
        freed = {(region, use) for use, one in enumerate(uses) for region in one.frees}
        for stay in self.stays:
            position = positions[stay.last]
            if stay.last < self.problem.slots and (stay.region, position - 1) not in freed:
                actions.append(Action(position, Kind.EVICT, stay.region))
        fetches = [
            transfer
            for transfer in self.transfers
            if transfer.kind is Kind.FETCH
            and (transfer.region, transfer.first) in comes
            and not (transfer.first == 0 and transfer.region in self.problem.resident)
        ]
        fetches.sort(key=lambda transfer: transfer.last)
        actions += [Action(positions[t.first], Kind.FETCH, t.region) for t in fetches]
        actions.sort(key=lambda action: action.position)
        written = sum(sizes[t.region] for t in self.transfers if t.kind is Kind.EVICT)
        read = sum(sizes[t.region] for t in fetches)
        return Schedule(tuple(actions), max(self.taken(), default=0), read, written, NextUse(uses))

    def taken(self) -> list[int]:
        """Return the bytes that are taken in each slot."""
        change = [0] * (self.problem.slots + 1)
        for stay in self.stays:
            change[stay.first] += self.problem.sizes[stay.region]
            change[stay.last] -= self.problem.sizes[stay.region]
        taken = list(accumulate(change[:-1]))
        for number in self.again:
            taken[self.problem.slot_of_again[number]] += self.problem.again[number].scratch
        return taken


def plan_of(choice: Choice) -> Plan:
    """Return the plan that ``choice`` describes."""
    layout, windows = choice.layout, choice.windows(pieces=True)
    problem = layout.problem
    if not windows.feasible:
        raise BudgetError("the choice does not fit: this is a bug of the planner")
    assert windows.fetch_pieces is not None
    assert windows.write_pieces is not None
    transfers: list[Transfer] = []
    stays: list[Stay] = []
    decisions: list[tuple[int, int, Decision]] = []
    for gap, moves in enumerate(choice.moved):
        region, before, after = layout.region[gap], layout.before[gap], layout.after[gap]
        if not layout.absent[gap]:
            decision = Decision.OFFLOAD if moves else Decision.KEEP
            decisions.append((region, before, decision))
        if not moves:
            stays.append(Stay(region, before + 1, after))
            continue
        if windows.stop[gap] > before + 1:
            stays.append(Stay(region, before + 1, windows.stop[gap]))
        if layout.fetch[gap]:
            first = windows.start[gap]
            if first < after:
                stays.append(Stay(region, first, after))
            pieces = tuple(reversed(windows.fetch_pieces.get(gap, ())))
            transfers.append(Transfer(region, Kind.FETCH, first, after, pieces, windows.left[gap]))
    for content, gaps in enumerate(layout.gaps_of):
        first_moved = next((gap for gap in gaps if choice.moved[gap]), -1)
        if first_moved >= 0:
            transfers.append(
                Transfer(
                    layout.region[first_moved],
                    Kind.EVICT,
                    layout.begins[content] + 1,
                    windows.stop[first_moved],
                    tuple(windows.write_pieces.get(content, ())),
                    windows.unsaved[content],
                )
            )
    for number in sorted(layout.active):
        call = problem.again[number]
        slot = problem.slot_of_use[call.stop - 1]
        decisions += [(region, slot, Decision.RECOMPUTE) for region in call.makes]
    return Plan(
        problem=problem,
        again=tuple(sorted(layout.active)),
        transfers=tuple(sorted(transfers, key=lambda t: (t.first, t.kind, t.region))),
        stays=_joined((*stays, *touches(problem, layout.active))),
        decisions=tuple(sorted(decisions, key=lambda d: (d[1], d[0]))),
        seconds=choice.seconds,
        compute_s=problem.compute_s,
        again_s=layout.again_s,
        exposed_s=windows.exposed_s,
    )


def touches(problem: Problem, active: Iterable[int]) -> list[Stay]:
    """Return a stay of one slot for each touch, of what is computed again too."""
    stays = []
    for use, slot in zip(problem.uses, problem.slot_of_use, strict=True):
        stays += [Stay(r, slot, slot + 1) for r in dict.fromkeys((*use.regions, *use.creates))]
    for number in active:
        call, slot = problem.again[number], problem.slot_of_again[number]
        stays += [Stay(region, slot, slot + 1) for region in (*call.inputs, *call.makes)]
    return stays


def _joined(stays: Iterable[Stay]) -> tuple[Stay, ...]:
    """Return the stays with neighbours of one region made one."""
    joined: list[Stay] = []
    for stay in sorted(stays, key=lambda stay: (stay.region, stay.first)):
        if stay.first >= stay.last:
            continue
        if joined and joined[-1].region == stay.region and joined[-1].last == stay.first:
            joined[-1] = replace(joined[-1], last=stay.last)
        else:
            joined.append(stay)
    return tuple(joined)


def _expanded(plan: Plan) -> tuple[tuple[Use, ...], list[int]]:
    """Return the uses of a plan, and for each slot the position of the first use from it on."""
    problem = plan.problem
    frees: dict[int, set[int]] = {slot: set() for slot in range(problem.slots)}
    scratch = {number: len(problem.sizes) + place for place, number in enumerate(plan.again)}
    for number in plan.again:
        frees[problem.slot_of_again[number]].add(scratch[number])
    for life in problem.lives:
        taking = [entry for entry in life.again if entry[0] in scratch]
        slots = sorted({*life.slots, *(slot for _, slot, _ in taking)})
        for _, made, makes in taking:
            if makes:
                frees[max(slot for slot in slots if slot < made)].add(life.region)
        if not life.survives:
            frees[slots[-1]].add(life.region)
    by_slot = dict(zip(problem.slot_of_use, problem.uses, strict=True))
    number_of = {problem.slot_of_again[number]: number for number in plan.again}
    uses: list[Use] = []
    positions: list[int] = []
    for slot in range(problem.slots):
        positions.append(len(uses))
        if slot in by_slot:
            uses.append(replace(by_slot[slot], frees=tuple(sorted(frees[slot]))))
        elif slot in number_of:
            call = problem.again[number_of[slot]]
            uses.append(
                Use(
                    regions=(*call.inputs, *call.makes),
                    creates=(*call.makes, scratch[number_of[slot]]),
                    frees=tuple(sorted(frees[slot])),
                    seconds=call.seconds,
                    writes=call.makes,
                )
            )
    return tuple(uses), [*positions, len(uses)]
