"""Timed plans: feasible in the model, never worse than one means alone, and checked for real."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.errors import BudgetError, ConfigError, PlanError
from dynoffload.experiments.planner_cases import drawn
from dynoffload.planning import Kind, Use
from dynoffload.planning.timed import (
    Again,
    Decision,
    Plan,
    Problem,
    check,
    computed_again,
    plan,
)

QUICK = 20_000


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw any string with creations, deaths and writes, and calls that may be computed again."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    length, count = chance.randint(1, 9), chance.randint(1, 7)
    sizes = [chance.choice((0, 1, 2, 5, 9)) for _ in range(count)]
    dead: set[int] = set()
    touched: set[int] = set()
    uses = []
    for _ in range(length):
        regions = {*chance.choices(range(count), k=chance.randint(1, 3))}
        creates = (regions & dead) | {r for r in regions - touched if chance.random() < 0.5}
        dead -= creates
        touched |= regions
        frees = {r for r in regions if chance.random() < 0.2}
        dead |= frees
        writes = {r for r in regions if chance.random() < 0.3}
        seconds = chance.choice((0.0, 1.0, 2.5))
        uses.append(Use(tuple(regions), tuple(creates), tuple(frees), seconds, tuple(writes)))
    need = max(sum(sizes[region] for region in use.regions) for use in uses)
    capacity = max(1, need + chance.choice((0, 2, 6, 40)))
    spans = [(a, chance.randint(a + 1, length)) for a in range(length) if chance.random() < 0.7]
    calls = [(f"call {a}", a, b) for a, b in spans]
    resident: list[int] = []
    for region in range(count):
        born = any(region in use.creates for use in uses)
        held = sum(sizes[r] for r in resident)
        if not born and held + sizes[region] <= capacity and chance.random() < 0.5:
            resident.append(region)
    return Problem(
        tuple(uses),
        tuple(sizes),
        capacity,
        read_bps=chance.choice((0.5, 2.0, 10.0)),
        write_bps=chance.choice((0.5, 2.0)),
        resident=frozenset(resident),
        dirty=frozenset(region for region in resident if chance.random() < 0.5),
        again=computed_again(uses, sizes, calls, chance.randint(1, length)),
    )


@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_plan_can_be_carried_out(problem: Problem) -> None:
    found = plan(problem, allowance=QUICK)
    check(found)
    assert max(found.taken(), default=0) <= problem.capacity
    assert found.seconds == pytest.approx(found.compute_s + found.again_s + found.exposed_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400))
def test_the_schedule_of_a_plan_runs_within_capacity(seed: int) -> None:
    """Carried out in order, at the positions it names: all is there when used, and all fits."""
    found = plan(drawn(seed).problem, allowance=QUICK)
    problem, schedule = found.problem, found.schedule()
    uses, sizes = found.string()
    here = set(problem.resident)
    actions = list(schedule.actions)
    for position, use in enumerate(uses):
        while actions and actions[0].position == position:
            action = actions.pop(0)
            if action.kind is Kind.EVICT:
                here.remove(action.region)
            else:
                assert action.region not in here
                here.add(action.region)
        assert here.isdisjoint(use.creates)
        here.update(use.creates)
        assert here.issuperset(region for region in use.regions if sizes[region])
        assert sum(sizes[region] for region in here) <= problem.capacity
        here.difference_update(use.frees)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 400))
def test_both_means_are_never_worse_than_one(seed: int) -> None:
    problem = drawn(seed).problem
    both = plan(problem, allowance=QUICK)
    for without in ({"again": False}, {"move": False}):
        try:
            one = plan(problem, allowance=QUICK, **without)
        except BudgetError:
            continue
        check(one)
        assert both.seconds <= one.seconds * (1 + 1e-9)


def test_a_plan_is_the_same_each_time() -> None:
    problem = drawn(3).problem
    assert plan(problem, allowance=QUICK) == plan(problem, allowance=QUICK)


def test_room_for_everything_exposes_only_what_has_to_come() -> None:
    problem = drawn(0).problem
    roomy = replace(problem, capacity=10 * sum(problem.sizes), read_bps=1e9, write_bps=1e9)
    found = plan(roomy)
    assert found.seconds == pytest.approx(roomy.compute_s, rel=1e-3)
    assert not found.again
    assert all(transfer.kind is Kind.FETCH for transfer in found.transfers)


def forward_and_backward(link: float) -> Problem:
    """Two layers with one weight each: the inside of the first, 2, is in the way of the second."""
    uses = (
        Use((0, 2, 3), (2, 3), (), 1.0),
        Use((3, 4), (4,), (), 1.0),
        Use((3, 4), (), (4,), 1.0),
        Use((0, 2, 3), (), (2, 3), 1.0),
    )
    sizes = (1, 0, 6, 1, 7)
    return Problem(
        uses,
        sizes,
        capacity=9,
        read_bps=link,
        write_bps=link,
        resident=frozenset({0}),
        again=computed_again(uses, sizes, [("first", 0, 1)], 2),
    )


def test_a_slow_link_computes_again_and_a_fast_one_moves() -> None:
    slow, fast = plan(forward_and_backward(0.1)), plan(forward_and_backward(100.0))
    assert slow.again == (0,)
    assert slow.seconds == pytest.approx(5.0)
    assert (2, 0, Decision.RECOMPUTE) in slow.decisions
    assert fast.again == ()
    assert 4.0 <= fast.seconds < 4.2
    assert [d for r, _, d in fast.decisions if r == 2] == [Decision.OFFLOAD]


def broken(found: Plan) -> list[tuple[str, Plan]]:
    """Return plans with one thing wrong, and what is complained about."""
    problem = found.problem
    fetch = next(t for t in found.transfers if t.kind is Kind.FETCH)
    write = next(t for t in found.transfers if t.kind is Kind.EVICT)
    others = tuple(t for t in found.transfers if t is not fetch)
    unwritten = tuple(t for t in found.transfers if t is not write)
    stay = max(found.stays, key=lambda stay: stay.last - stay.first)
    short = tuple(s for s in found.stays if s is not stay)
    crowd = (*found.stays, *(stay for _ in range(problem.capacity)))
    return [
        ("before it is fetched|takes", replace(found, transfers=others)),
        ("stale|takes|loses", replace(found, transfers=unwritten)),
        ("where it is not|without room", replace(found, stays=short)),
        ("bytes in slot", replace(found, stays=crowd)),
        ("and says", replace(found, seconds=found.seconds * 0.9)),
        ("of the", replace(found, transfers=(*others, replace(fetch, exposed_s=1e9)))),
        (
            "outside|of the",
            replace(found, transfers=(*others, replace(fetch, pieces=((99, 1.0),)))),
        ),
    ]


@pytest.mark.parametrize("number", range(7))
def test_the_checker_finds_what_is_wrong(number: int) -> None:
    found = next(
        one
        for one in (plan(drawn(seed).problem, allowance=QUICK) for seed in range(0, 45, 5))
        if {t.kind for t in one.transfers} == {Kind.FETCH, Kind.EVICT}
    )
    complaint, wrong = broken(found)[number]
    with pytest.raises(PlanError, match=complaint):
        check(wrong)


def test_what_may_be_computed_again() -> None:
    sizes = (4, 4, 2, 8)
    plain = [Use((0, 1), (1,), (), 1.0), Use((1, 3), (3,), (3,), 2.0), Use((1,), (), (1,), 1.0)]
    calls = [("layer", 0, 1)]
    (call,) = computed_again(plain, sizes, calls, 2) or (None,)
    assert call is None, "its result is read by the rest of forward: it is no inside"
    inside = [
        Use((0, 1, 2), (1, 2), (), 1.5),
        Use((2, 3), (3,), (3,), 2.0),
        Use((1,), (), (1, 2), 1.0),
    ]
    assert computed_again(inside, sizes, calls, 2) == (
        Again("layer", 0, 1, 2, inputs=(0,), makes=(1,), scratch=2, seconds=1.5),
    )
    writes_input = [replace(inside[0], writes=(0,)), *inside[1:]]
    assert not computed_again(writes_input, sizes, calls, 2)
    input_changes = [inside[0], Use((0, 2), writes=(0,)), inside[2]]
    assert not computed_again(input_changes, sizes, calls, 2)


def test_bad_problems_are_refused() -> None:
    use = Use((0,), seconds=1.0)
    with pytest.raises(ConfigError, match="bandwidths"):
        Problem((use,), (1,), 4, 0.0, 1.0)
    with pytest.raises(BudgetError, match="use 0 of the plan needs"):
        Problem((use,), (9,), 4, 1.0, 1.0)
    with pytest.raises(ConfigError, match="names a region beyond the 1"):
        Problem((Use((1,)),), (1,), 4, 1.0, 1.0)
    with pytest.raises(ConfigError, match="use 1 names region 0, which an earlier use freed"):
        Problem((replace(use, frees=(0,)), use), (1,), 4, 1.0, 1.0)
    with pytest.raises(ConfigError, match="resident before the first use"):
        Problem((use,), (3, 3), 4, 1.0, 1.0, resident=frozenset({0, 1}))
    with pytest.raises(ConfigError, match="among the resident"):
        Problem((use,), (3,), 4, 1.0, 1.0, dirty=frozenset({0}))
    with pytest.raises(BudgetError, match="with nothing moved"):
        plan(Problem((use, Use((1,))), (3, 3), 4, 1.0, 1.0), move=False)
