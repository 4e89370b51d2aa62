"""Schedules: never over capacity, every use resident, executable however late the executor is.

The judge is `execute`, a machine written for these tests alone: it carries a schedule out at the
earliest moments, at the latest, or at drawn ones between, and refuses whatever a real migrator
could not do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_work import times_reference

from dynoffload.errors import BudgetError, ConfigError
from dynoffload.planning.cursor import NEVER, PlanCursor
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Action, Kind, Schedule, Use

WINDOWS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])


@dataclass(frozen=True)
class Problem:
    """What a policy is asked to plan."""

    uses: list[Use]
    sizes: list[int]
    capacity: int
    resident: list[int]
    dirty: list[int]

    def plan(self, policy: LookAhead) -> Schedule:
        return policy.plan(self.uses, self.sizes, self.capacity, self.resident, self.dirty)


@dataclass
class Machine:
    """Fast memory, which breaks rather than do what is impossible."""

    sizes: Sequence[int]
    capacity: int
    resident: set[int]
    dirty: set[int]
    dead: set[int] = field(default_factory=set)
    bytes_in: int = 0
    bytes_out: int = 0
    peak: int = 0

    def act(self, action: Action) -> None:
        region = action.region
        assert region not in self.dead, f"{action} moves a dead region"
        if action.kind is Kind.FETCH:
            assert region not in self.resident, f"{action} fetches what is here"
            self.resident.add(region)
            self.bytes_in += self.sizes[region]
        else:
            assert region in self.resident, f"{action} evicts what is not here"
            self.resident.remove(region)
            if region in self.dirty:
                self.dirty.remove(region)
                self.bytes_out += self.sizes[region]
        self.weigh()

    def use(self, use: Use) -> None:
        for region in use.creates:
            self.dead.discard(region)
            self.resident.add(region)
            self.dirty.add(region)
        assert self.resident.issuperset(use.regions), f"{use} lacks a region"
        self.peak = max(self.peak, self.weigh())
        self.dirty.update(use.writes)
        for region in use.frees:
            self.resident.discard(region)
            self.dirty.discard(region)
            self.dead.add(region)

    def weigh(self) -> int:
        now = sum(self.sizes[region] for region in self.resident)
        assert now <= self.capacity, f"{now} bytes resident of {self.capacity}"
        return now


def execute(problem: Problem, schedule: Schedule, eager: Callable[[], bool]) -> Machine:
    """Run the string: evictions at their position, fetches when they must or ``eager()`` says."""
    machine = Machine(problem.sizes, problem.capacity, set(problem.resident), set(problem.dirty))
    assert [a.position for a in schedule.actions] == sorted(a.position for a in schedule.actions)
    queue = list(schedule.actions)

    def run_until(done: Callable[[], bool], position: int) -> None:
        while not done():
            action = queue.pop(0)
            assert action.position <= position, f"{action} is needed at {position}"
            machine.act(action)

    for position, use in enumerate(problem.uses):
        for action in [a for a in queue if a.kind is Kind.EVICT and a.position <= position]:
            queue.remove(action)
            machine.act(action)
        while queue and queue[0].position <= position and eager():
            machine.act(queue.pop(0))
        needed = set(use.regions) - set(use.creates)
        run_until(lambda needed=needed: machine.resident >= needed, position)
        room = sum(problem.sizes[r] for r in set(use.creates) - machine.resident)

        def fits(room: int = room) -> bool:
            held = sum(problem.sizes[r] for r in machine.resident)
            return held + room <= problem.capacity

        run_until(fits, position)
        machine.use(use)
    assert not queue, f"never due: {queue}"
    return machine


def execute_in_order(problem: Problem, schedule: Schedule) -> Machine:
    """Run the list as it stands, each action at its earliest moment."""
    machine = Machine(problem.sizes, problem.capacity, set(problem.resident), set(problem.dirty))
    actions = iter([*schedule.actions, None])
    action = next(actions)
    for position, use in enumerate(problem.uses):
        while action is not None and action.position <= position:
            machine.act(action)
            action = next(actions)
        machine.use(use)
    assert action is None
    return machine


@st.composite
def problems(draw: st.DrawFn, max_uses: int = 30, max_regions: int = 8) -> Problem:
    """Draw a string in which regions are created, written, freed and created again.

    Lengths shrink; what stands at each place comes from a seed, as drawing it would take longer
    than testing it.
    """
    length, count = draw(st.integers(0, max_uses)), draw(st.integers(1, max_regions))
    chance = random.Random(draw(st.integers(0, 2**32)))
    sizes = [chance.randrange(10) for _ in range(count)]

    def some(of: Collection[int], share: float = 0.5) -> tuple[int, ...]:
        return tuple(region for region in of if chance.random() < share)

    dead: set[int] = set()
    uses: list[Use] = []
    for _ in range(length):
        regions = tuple(chance.choices(range(count), k=chance.randrange(4)))
        creates = {*some(dead, 0.2), *(set(regions) & dead)}
        if chance.random() < 0.1:
            creates |= {*some(range(count), 0.2)}
        dead -= creates
        frees = some(set(regions) | creates, 0.2)
        if chance.random() < 0.1:
            frees += some(set(range(count)) - dead - set(frees), 0.2)
        dead |= set(frees)
        uses.append(Use(regions, tuple(creates), frees, 0.0, some(set(regions))))
    need = max((sum(sizes[r] for r in {*u.regions, *u.creates}) for u in uses), default=0)
    capacity = need + chance.choice([0, chance.randrange(4), chance.randrange(30)])
    resident: list[int] = []
    for region in chance.sample(range(count), count):
        if sum(sizes[r] for r in [*resident, region]) <= capacity and chance.random() < 0.5:
            resident.append(region)
    return Problem(uses, sizes, capacity, resident, list(some(resident)))


def always() -> bool:
    return True


def never() -> bool:
    return False


@given(problem=problems(), window=WINDOWS, chance=st.randoms(use_true_random=False))
@settings(max_examples=600, deadline=None)
def test_a_schedule_is_executable_at_any_permitted_moment_with_the_same_traffic(
    problem: Problem, window: float, chance: random.Random
) -> None:
    schedule = problem.plan(LookAhead(window))
    earliest = execute(problem, schedule, always)
    in_order = execute_in_order(problem, schedule)
    late = [
        execute(problem, schedule, never),
        execute(problem, schedule, lambda: chance.random() < 0.5),
    ]
    for machine in [earliest, *late]:
        assert machine.bytes_in == in_order.bytes_in
        assert machine.bytes_out == in_order.bytes_out
        assert machine.peak <= in_order.peak


@given(
    problem=problems(max_uses=12, max_regions=5),
    window=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=150, deadline=None)
def test_traffic_is_never_below_the_optimum_and_equals_it_for_equal_sizes(
    problem: Problem, window: float
) -> None:
    """Belady's rule reads the fewest bytes where regions are of one size and none is created."""
    uses = [Use(use.regions, writes=use.writes) for use in problem.uses]
    sizes = [1] * len(problem.sizes)
    need = max((len(set(use.regions)) for use in uses), default=0)
    capacity = max(need, len(problem.resident), problem.capacity // 8)
    plain = Problem(uses, sizes, capacity, problem.resident, problem.dirty)
    least = _fewest_reads(plain)
    read = execute_in_order(plain, plain.plan(LookAhead(window))).bytes_in
    assert read >= least
    if window == 0.0:
        assert read == least


def _fewest_reads(problem: Problem) -> int:
    """Return the fewest bytes any plan reads, by trying every set of residents after every use."""
    costs = {frozenset(problem.resident): 0}
    for use in problem.uses:
        needed = frozenset(use.regions)
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            reads = cost + sum(problem.sizes[region] for region in needed - held)
            for kept in _subsets(held - needed):
                now = kept | needed
                if sum(problem.sizes[region] for region in now) <= problem.capacity:
                    after[now] = min(reads, after.get(now, reads))
        costs = after
    return min(costs.values())


def _subsets(regions: Collection[int]) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for region in regions:
        found += [subset | {region} for subset in found]
    return found


def test_nothing_is_fetched_for_a_doubtful_use() -> None:
    uses = [Use((0,)), Use((1,)), Use((2,)), Use((0,), doubtful=True), Use((2,))]
    actions = LookAhead(0.0).plan(uses, [4] * 3, 4, []).actions
    assert [one.region for one in actions if one.kind is Kind.FETCH] == [0, 1, 2, 2]


@given(problem=problems(), window=WINDOWS, doubts=st.sets(st.integers(0, 29)), chance=st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_doubtful_use_hides_no_other(
    problem: Problem, window: float, doubts: set[int], chance: bool
) -> None:
    """What a certain use needs is here by then, whether or not doubtful ones happen."""
    uses = [replace(use, doubtful=n in doubts) for n, use in enumerate(problem.uses)]
    schedule = replace(problem, uses=uses).plan(LookAhead(window))
    here, actions = set(problem.resident), list(schedule.actions)
    for position, use in enumerate(uses):
        while actions and actions[0].position <= position:
            action = actions.pop(0)
            (here.add if action.kind is Kind.FETCH else here.discard)(action.region)
        if use.doubtful:
            here |= {*use.regions} if chance else set()
        here.update(use.creates)
        assert use.doubtful or here.issuperset(use.regions)
        here -= {*use.frees}


def test_what_a_doubtful_use_needs_is_kept_if_there_is_room() -> None:
    uses = [Use((0,)), Use((1,)), Use((2,)), Use((0,), doubtful=True)]
    actions = LookAhead(0.0).plan(uses, [4] * 3, 8, []).actions
    assert [one.region for one in actions if one.kind is Kind.EVICT] == [1]


def test_what_need_not_be_written_leaves_first() -> None:
    """Weights are read in forward and backward, and what each saves between stays with them."""
    uses = [Use((weight,), creates=(4 + weight,)) for weight in range(4)]
    uses += [Use((weight, 4 + weight), frees=(4 + weight,)) for weight in reversed(range(4))]
    problem = Problem(uses, [4] * 4 + [1] * 4, 12, [], [])
    machine = execute_in_order(problem, problem.plan(LookAhead(0.0)))
    assert machine.bytes_out == 0
    assert machine.bytes_in == 4 * 4 + 2 * 4


def test_what_is_read_again_and_again_stays() -> None:
    """Two weights in turns, and each use saves something: each is read twice more at most."""
    uses = [Use((number % 2,), creates=(2 + number,)) for number in range(20)]
    uses += [Use((n % 2, 2 + n), frees=(2 + n,)) for n in reversed(range(20))]
    problem = Problem(uses, [4] * 2 + [1] * 20, 16, [], [])
    machine = execute_in_order(problem, problem.plan(LookAhead(0.0)))
    assert machine.bytes_out <= 20 - 16 + 2 * 4
    assert machine.bytes_in <= 2 * 4 + machine.bytes_out + 2 * 2 * 4


def test_a_use_larger_than_the_capacity_is_refused_with_need_and_have() -> None:
    uses = [Use((0,)), Use((0, 1), creates=(2,)), Use((1,))]
    with pytest.raises(BudgetError, match=r"use 1 .*\(12 bytes\).*\(11 bytes\).*raise the budget"):
        LookAhead().plan(uses, [3, 4, 5], 11, [])


@pytest.mark.parametrize(
    ("uses", "resident", "dirty", "told"),
    [
        ([Use((0,), frees=(0,)), Use((0,))], [], [], "use 1 names region 0, which is dead"),
        ([Use((1,))], [], [], "use 0 names a region beyond the 1"),
        ([Use((-1,))], [], [], "use 0 names a region beyond the 1"),
        ([Use((0,), frees=(2,))], [], [], "use 0 names a region beyond the 1"),
        ([Use((0,))], [7], [], "resident region 7"),
        ([Use((0,))], [], [0], "dirty region 0 is not among the resident"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    uses: list[Use], resident: list[int], dirty: list[int], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        LookAhead().plan(uses, [1], 4, resident, dirty)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        LookAhead(1.5)


def test_a_cursor_looks_forward_and_goes_back() -> None:
    cursor = PlanCursor([Use((0,)), Use((1,), creates=(2,)), Use((0,))])
    assert [cursor.next_use(region) for region in range(4)] == [0, 1, 1, NEVER]
    assert sorted(cursor.advance(2)) == [0, 1, 2]
    assert [cursor.next_use(region) for region in range(4)] == [2, NEVER, NEVER, NEVER]
    assert cursor.regions() == (0,)
    cursor.advance(1)
    assert [cursor.next_use(region) for region in range(4)] == [2, 1, 1, NEVER]


def step_string(
    modules: int = 150, used: int = 75, length: int = 1500
) -> tuple[list[Use], list[int]]:
    """Return steps over modules of four regions each: weight, gradient and two of the optimizer."""
    chance = random.Random(0)
    sizes = [size for _ in range(modules) for size in [chance.randrange(1 << 20, 32 << 20)] * 4]
    uses: list[Use] = []
    while len(uses) < length:
        order = [chance.randrange(modules) * 4 for _ in range(used)]
        uses += [Use((first,)) for first in order]
        uses += [Use((f, f + 1), writes=(f + 1,)) for f in reversed(order)]
        uses += [Use(tuple(range(f, f + 4)), writes=(f, f + 2, f + 3)) for f in sorted(set(order))]
    return uses[:length], sizes


@pytest.mark.alone
def test_planning_1500_uses_of_600_regions_takes_ten_times_the_reference() -> None:
    """The product's limit is 10 ms where the reference takes one."""
    uses, sizes = step_string()
    assert (len(uses), len(sizes)) == (1500, 600)
    capacity = sum(sizes) // 4
    assert times_reference(lambda: LookAhead().plan(uses, sizes, capacity, [])) < 10
