"""A plan: what is recomputed, what moves in which slots, the seconds of the step; and its checker.

`check` carries a plan out by the model and knows nothing of the search that found it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from dynoffload.experiments.planner.choosing import Choice
from dynoffload.experiments.planner.problem import Problem
from dynoffload.planning.schedule import Kind

_EPS = 1e-9


class PlanError(ValueError):
    """A plan that the model does not allow."""


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
        again: numbers of the calls that are recomputed.
        transfers: by their first slot.
        stays: where regions take room.
        seconds: of the step.
    """

    problem: Problem
    again: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    stays: tuple[Stay, ...]
    seconds: float

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
    layout, windows = choice.layout, choice.windows()
    problem = layout.problem
    assert windows.feasible
    transfers: list[Transfer] = []
    stays: list[Stay] = []
    for gap, moves in enumerate(choice.moved):
        region, before, after = layout.region[gap], layout.before[gap], layout.after[gap]
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
    return Plan(
        problem=problem,
        again=tuple(sorted(layout.active)),
        transfers=tuple(sorted(transfers, key=lambda t: (t.first, t.kind, t.region))),
        stays=_joined((*stays, *_touches(problem, layout.active))),
        seconds=choice.seconds,
    )


def _touches(problem: Problem, active: Iterable[int]) -> list[Stay]:
    """Return a stay of one slot for each touch, of what is recomputed too."""
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


def check(plan: Plan) -> None:
    """Carry ``plan`` out.

    Raises:
        PlanError: it passes the capacity or the link, uses what is not there or not the present
            content, loses what must survive, or does not take the seconds that it says.
    """
    _Run(plan).run()


class _Run:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.problem = plan, plan.problem
        self.stays: dict[int, list[Stay]] = defaultdict(list)
        for stay in plan.stays:
            self.stays[stay.region].append(stay)
        self.version: dict[int, int] = defaultdict(int)  # of a region's content
        self.below: dict[int, int] = {}  # the version in the tier below
        self.fetched: dict[int, tuple[int, int]] = {}  # region -> slot of use, version
        self.created: dict[int, int] = {}  # region -> slot of its last creation
        for region in range(len(self.problem.sizes)):
            if region not in self.problem.dirty:
                self.below[region] = 0

    def run(self) -> None:
        plan, problem = self.plan, self.problem
        self._time()
        taken = plan.taken()
        use_at = dict(zip(problem.slot_of_use, problem.uses, strict=True))
        call_at = {problem.slot_of_again[n]: problem.again[n] for n in plan.again}
        for one in plan.again:
            for other in plan.again:
                self._must(
                    one == other or not problem.again[one].overlaps(problem.again[other]),
                    "computes two calls again that share a use",
                )
        ending: dict[int, list[Transfer]] = defaultdict(list)
        beginning: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in plan.transfers:
            where = beginning if transfer.kind is Kind.FETCH else ending
            where[transfer.first if transfer.kind is Kind.FETCH else transfer.last].append(transfer)
        alive: dict[int, bool] = {}  # region -> whether its content must survive
        touched = {r for use in problem.uses for r in (*use.regions, *use.creates)}
        born: set[int] = set()
        for slot in range(problem.slots + 1):
            for transfer in ending[slot]:
                self._written(transfer)
            for transfer in beginning[slot]:
                self._must(
                    self.below.get(transfer.region) == self.version[transfer.region],
                    f"reads region {transfer.region} in slot {slot}, which is stale below",
                )
                self.fetched[transfer.region] = transfer.last, self.version[transfer.region]
            if slot == problem.slots:
                break
            self._must(
                taken[slot] <= problem.capacity,
                f"takes {taken[slot]} bytes in slot {slot}, and there are {problem.capacity}",
            )
            if slot in use_at:
                use = use_at[slot]
                for region in use.regions:
                    if region not in use.creates:
                        self._here(region, slot)
                        alive.setdefault(region, True)
                for region in use.creates:
                    self._made(region, slot)
                    born.add(region)
                    alive[region] = True
                for region in use.writes:
                    if region not in use.creates:
                        self.version[region] += 1
                for region in use.frees:
                    alive[region] = False
            elif slot in call_at:
                call = call_at[slot]
                for region in call.inputs:
                    self._here(region, slot)
                for region in call.makes:
                    self._made(region, slot)
        for region in problem.resident - touched:
            alive[region] = True
        for region, survives in alive.items():
            if survives and problem.sizes[region]:
                kept = self._since(region, problem.slots - 1) is not None
                self._must(
                    kept or self.below.get(region) == self.version[region],
                    f"loses region {region}, which must survive the step",
                )

    def _time(self) -> None:
        """Check that the link is never passed and that the seconds are those of the plan."""
        plan, problem = self.plan, self.problem
        seconds = [0.0] * problem.slots
        for use, slot in zip(problem.uses, problem.slot_of_use, strict=True):
            seconds[slot] = use.seconds
        for number in plan.again:
            seconds[problem.slot_of_again[number]] = problem.again[number].seconds
        total = sum(seconds)
        link = [0.0] * problem.slots
        for transfer in plan.transfers:
            fetch = transfer.kind is Kind.FETCH
            rate = problem.read_bps if fetch else problem.write_bps
            moved = transfer.exposed_s
            for slot, part in transfer.pieces:
                self._must(
                    transfer.first <= slot < transfer.last, "moves outside a transfer's slots"
                )
                link[slot] += part
                moved += part
            size = problem.sizes[transfer.region]
            self._must(
                abs(moved - size / rate) <= _EPS * max(1.0, size / rate),
                f"moves {moved * rate:.0f} of the {size} bytes of region {transfer.region}",
            )
            total += transfer.exposed_s
        for slot, busy in enumerate(link):
            self._must(
                busy <= seconds[slot] + _EPS,
                f"moves for {busy} s in slot {slot} of {seconds[slot]}",
            )
        self._must(
            abs(total - plan.seconds) <= 1e-6 * max(total, 1e-9),
            f"takes {total} s, and says {plan.seconds}",
        )

    def _since(self, region: int, slot: int) -> int | None:
        """Return the first slot of the stay that covers ``slot``, None if none does."""
        for stay in self.stays[region]:
            if stay.first <= slot < stay.last:
                return stay.first
        return None

    def _here(self, region: int, slot: int) -> None:
        """Check that a region is wholly there in a slot, with its present content."""
        if not self.problem.sizes[region]:
            return
        since = self._since(region, slot)
        self._must(since is not None, f"uses region {region} in slot {slot}, where it is not")
        assert since is not None
        if self.created.get(region, -1) >= since:
            return
        due, version = self.fetched.get(region, (slot + 1, -1))
        fetched = since <= due <= slot and version <= self.version[region]
        there = since == 0 and region in self.problem.resident
        self._must(fetched or there, f"uses region {region} in slot {slot} before it is fetched")

    def _made(self, region: int, slot: int) -> None:
        if self.problem.sizes[region]:
            self._must(self._since(region, slot) is not None, f"makes region {region} without room")
        self.version[region] += 1
        self.created[region] = slot

    def _written(self, transfer: Transfer) -> None:
        """Take note of a write that is over at the start of its last slot."""
        region = transfer.region
        slots = {slot for slot, _ in transfer.pieces}
        if transfer.last > 0:
            slots.add(transfer.last - 1)
        for slot in slots:
            self._must(
                self._since(region, slot) is not None,
                f"writes region {region} in slot {slot}, where it is not",
            )
        # Whoever modified it after the transfer's first slot made what was written stale.
        changed = self._modified(region, transfer.first, transfer.last)
        self._must(not changed, f"writes region {region} while it is modified")
        self.below[region] = self.version[region]

    def _modified(self, region: int, first: int, last: int) -> bool:
        problem = self.problem
        slots = [
            slot
            for use, slot in zip(problem.uses, problem.slot_of_use, strict=True)
            if region in use.writes or region in use.creates
        ]
        slots += [
            problem.slot_of_again[n] for n in self.plan.again if region in problem.again[n].makes
        ]
        return any(first <= slot < last for slot in slots)

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            raise PlanError(f"the plan {what}")
