"""The planner's model has one meaning: for its search, its checker and the exact optimum."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dynoffload.errors import BudgetError
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.planner import optimality
from dynoffload.experiments.planner.blocks import plan_blocks
from dynoffload.experiments.planner.cases import drawn, recorded
from dynoffload.experiments.planner.exact import optimum
from dynoffload.experiments.planner.layout import Layout
from dynoffload.experiments.planner.optimality import Optimality, Params
from dynoffload.experiments.planner.plan import Plan, PlanError, check
from dynoffload.experiments.planner.problem import Again, Problem, recomputable
from dynoffload.experiments.planner.search import plan
from dynoffload.experiments.planner.windows import room_of
from dynoffload.planning.schedule import Kind, Use

QUICK = 20_000


def tiny(seed: int) -> Problem:
    """Return a problem of few uses, in which something may be recomputed."""
    chance = random.Random(seed)
    layers = 2
    sizes: list[int] = []

    def region(low: int, high: int) -> int:
        sizes.append(chance.randint(low, high))
        return len(sizes) - 1

    weights = [region(1, 5) for _ in range(chance.choice((1, layers)))]
    outs = [region(1, 3) for _ in range(layers)]
    inner = [region(2, 8) for _ in range(layers)]
    uses = []
    for layer in range(layers):
        reads = [weights[layer % len(weights)], *outs[max(0, layer - 1) : layer]]
        made = (outs[layer], inner[layer])
        uses.append(Use((*reads, *made), made, (), chance.choice((0.5, 1.0, 2.0))))
    backward = len(uses)
    for layer in reversed(range(layers)):
        regions = (weights[layer % len(weights)], *outs[max(0, layer - 1) : layer], inner[layer])
        writes = (weights[layer % len(weights)],) if chance.random() < 0.4 else ()
        frees = (outs[layer], inner[layer])
        uses.append(Use(regions, (), frees, chance.choice((0.5, 1.0, 2.0)), writes))
    need = max(sum(sizes[r] for r in {*use.regions, *use.creates}) for use in uses)
    start = frozenset(weights[:1]) if chance.random() < 0.5 else frozenset[int]()
    return Problem(
        tuple(uses),
        tuple(sizes),
        need + chance.choice((0, 2, 5)),
        read_bps=chance.choice((2.0, 8.0)),
        write_bps=chance.choice((2.0, 8.0)),
        resident=start,
        dirty=start if chance.random() < 0.5 else frozenset(),
        again=recomputable(
            uses, sizes, [(f"layer {n}", n, n + 1) for n in range(layers)], backward
        ),
    )


def subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield every subset."""
    for count in range(len(items) + 1):
        yield from itertools.combinations(items, count)


def by_force(problem: Problem) -> float:
    """Return the least seconds over all choices of calls, gaps and windows, one by one."""
    best = float("inf")
    for active in subsets(list(range(len(problem.again)))):
        calls = [problem.again[number] for number in active]
        if any(a.overlaps(b) for a, b in itertools.combinations(calls, 2)):
            continue
        layout = Layout(problem, active)
        free = [gap for gap in range(len(layout)) if not layout.absent[gap]]
        for chosen in subsets(free):
            moved = [layout.absent[gap] or gap in chosen for gap in range(len(layout))]
            room = room_of(layout, moved)
            if min(room, default=0) < 0:
                continue
            base = problem.compute_s + layout.again_s
            best = min(best, base + least_exposed(layout, moved, room))
    return best


def least_exposed(layout: Layout, moved: list[bool], room: list[int]) -> float:
    """Return the least exposed seconds over all windows in which the moved gaps take room."""
    gaps = [gap for gap, moves in enumerate(moved) if moves]
    writing = {
        next((gap for gap in of if moved[gap]), -1): content
        for content, of in enumerate(layout.gaps_of)
    }
    total = sum(layout.read_s[gap] for gap in gaps if layout.fetch[gap])
    total += sum(layout.write_s[gap] for gap in writing if gap >= 0)
    spans = []
    for gap in gaps:
        low, high = layout.before[gap] + 1, layout.after[gap]
        stops = range(low, high + 1) if gap in writing else (low,)
        if layout.fetch[gap]:
            spans.append([(stop, start) for stop in stops for start in range(stop, high + 1)])
        else:
            spans.append([(stop, high) for stop in stops])
    hidden = 0.0
    for windows in itertools.product(*spans):
        left = list(room)
        jobs: list[tuple[int, int, float]] = []
        for gap, (stop, start) in zip(gaps, windows, strict=True):
            held = [*range(layout.before[gap] + 1, stop)]
            if layout.fetch[gap]:
                held += range(start, layout.after[gap])
                jobs.append((start, layout.after[gap], layout.read_s[gap]))
            for slot in held:
                left[slot] -= layout.size[gap]
            if gap in writing:
                jobs.append((layout.begins[writing[gap]] + 1, stop, layout.write_s[gap]))
        if min(left, default=0) >= 0:
            hidden = max(hidden, most_hidden(layout.seconds, jobs))
    return total - hidden


def most_hidden(seconds: list[float], jobs: list[tuple[int, int, float]]) -> float:
    """Return the most that fits in the slots of each job: the earliest deadline goes first."""
    rest = [amount for _, _, amount in jobs]
    hidden = 0.0
    for slot, free in enumerate(seconds):
        for job in sorted(range(len(jobs)), key=lambda job: jobs[job][1]):
            if jobs[job][0] <= slot < jobs[job][1]:
                part = min(free, rest[job])
                rest[job] -= part
                free -= part
                hidden += part
    return hidden


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_that_of_all_plans(seed: int) -> None:
    problem = tiny(seed)
    found = optimum(problem)
    assert found.proven
    assert found.seconds == pytest.approx(by_force(problem), rel=1e-4)


@pytest.mark.parametrize("seed", [3, 8, 14, 18, 28, 35, 44, 50])
def test_the_planner_is_near_the_optimum_and_no_worse_than_one_means(seed: int) -> None:
    problem = drawn(seed).problem
    found, best = plan(problem), optimum(problem)
    check(found)
    assert best.proven
    assert best.seconds is not None
    assert best.seconds * (1 - 1e-4) <= found.seconds <= best.seconds * 1.1
    for without in ({"again": False}, {"move": False}):
        try:
            one = plan(problem, **without)
        except BudgetError:
            continue
        check(one)
        assert found.seconds <= one.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["moe", "gpt2"])
def test_real_steps_are_planned_in_blocks(name: str) -> None:
    """Seconds are those of the operators, no block has both phases, and the plan holds."""
    step = recorded(name)
    least, most = step.extent()
    seconds = sum(use.seconds for use in step.uses)
    blocks, found = plan_blocks(step, least + (most - least) // 3, most / seconds)
    check(found)
    assert sum(use.seconds for use in blocks.uses) == pytest.approx(seconds)
    assert any(stop == step.spans[step.backward - 1][1] for _, stop in blocks.spans)


def broken(found: Plan) -> list[tuple[str, Plan]]:
    """Return plans with one thing wrong, and what is complained about."""
    fetch = next(t for t in found.transfers if t.kind is Kind.FETCH)
    write = next(t for t in found.transfers if t.kind is Kind.EVICT)
    others = tuple(t for t in found.transfers if t is not fetch)
    unwritten = tuple(t for t in found.transfers if t is not write)
    stay = max(found.stays, key=lambda stay: stay.last - stay.first)
    short = tuple(s for s in found.stays if s is not stay)
    crowd = (*found.stays, *(stay for _ in range(found.problem.capacity)))
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


def test_what_may_be_recomputed() -> None:
    sizes = (4, 4, 2, 8)
    plain = [Use((0, 1), (1,), (), 1.0), Use((1, 3), (3,), (3,), 2.0), Use((1,), (), (1,), 1.0)]
    calls = [("layer", 0, 1)]
    assert not recomputable(plain, sizes, calls, 2), "forward itself reads what it makes"
    inside = [
        Use((0, 1, 2), (1, 2), (), 1.5),
        Use((2, 3), (3,), (3,), 2.0),
        Use((1,), (), (1, 2), 1.0),
    ]
    assert recomputable(inside, sizes, calls, 2) == (
        Again("layer", 0, 1, 2, inputs=(0,), makes=(1,), scratch=2, seconds=1.5),
    )
    writes_input = [replace(inside[0], writes=(0,)), *inside[1:]]
    assert not recomputable(writes_input, sizes, calls, 2)
    input_changes = [inside[0], Use((0, 2), writes=(0,)), inside[2]]
    assert not recomputable(input_changes, sizes, calls, 2)


def test_a_problem_that_is_not_proven_is_not_counted() -> None:
    row = {"case": "drawn 9", **optimality.compared(drawn(9), time_limit=0.01)}
    assert not row["proven"]
    counted = optimality.summary([row])
    assert counted["counted"] == 0
    assert counted["not_proven"] == ["drawn 9"]


def test_problems_are_compared_and_a_large_step_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    result = carry_out(Optimality, Params(seeds=2, networks=(), operators=(600,)), path)
    assert result["summary"]["problems"] == len(result["rows"]) - 1 == 2
    assert result["rows"][-1]["cpu_s"] > 0
    assert path.with_suffix(".svg").stat().st_size > 10_000
