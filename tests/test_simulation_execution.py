"""The simulated machine: times and bytes that can be reckoned by hand, and bounds that hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from phase_bound import least_bytes, least_seconds

from dynoffload.errors import BudgetError
from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Action, Kind, Use
from dynoffload.simulation.execution import Execution
from dynoffload.simulation.fast_memory import State, StepResult
from dynoffload.simulation.machine import Link, Machine

LINK = Link(read_bps=100.0, write_bps=50.0, mixed_bps=150.0)


def machine(fast: int, **changes: Any) -> Machine:
    return Machine(changes.pop("link", LINK), fast, **changes)


def use(*regions: int, seconds: float = 1.0, **parts: Any) -> Use:
    return Use(regions, seconds=seconds, **parts)


def plan(uses: Sequence[Use], *actions: Action) -> PlanCursor:
    return PlanCursor(uses, actions)


def ran(
    sizes: list[int], uses: Sequence[Use], on: Machine, plan: PlanCursor | None = None
) -> StepResult:
    """Run ``uses``; what none of them creates lies below at first."""
    execution = Execution(sizes, on)
    created = {region for use in uses for region in use.creates}
    execution.place(set(range(len(sizes))) - created)
    return execution.step(uses, plan)


def test_a_fault_costs_its_latency_and_a_prefetch_hides_behind_compute() -> None:
    """Demanded, the second region takes half a second and its second; planned, none of both."""
    link = Link(100.0, 50.0, 150.0, latency_s=0.25, fault_s=0.25)
    uses = [use(0, seconds=3.0), use(1)]
    ahead = Action(0, Kind.FETCH, 1)
    for overlap, followed, seconds in (
        (True, None, 4.0 + 1.5),
        (True, ahead, 4.0),
        (False, ahead, 4.0 + 1.25),
    ):
        execution = Execution([100, 100], machine(200, link=link, overlap=overlap))
        execution.place([0, 1])
        execution.step([use(0)])
        result = execution.step(uses, plan(uses, followed) if followed else None)
        assert result.seconds == pytest.approx(seconds)
        assert result.faults == (0 if followed else 1)


def test_only_what_was_modified_is_written() -> None:
    """Room for one of two: the one that was read leaves for nothing, the other at 50 B/s."""
    clean = ran([100, 100], [use(0), use(1)], machine(100))
    assert (clean.bytes_out, clean.seconds) == (0, pytest.approx(4.0))
    dirty = ran([100, 100], [use(0, writes=(0,)), use(1)], machine(100))
    assert (dirty.bytes_out, dirty.seconds) == (100, pytest.approx(6.0))


def test_both_directions_share_a_link_as_it_says() -> None:
    """A write of 100 beside a read of 100: as long as one, or in turns as long as both."""
    uses = [use(0, seconds=0.0, writes=(0,)), use(1, seconds=0.0), use(2, seconds=0.0)]
    sizes = [100, 100, 100]
    leaves = plan(uses, Action(1, Kind.EVICT, 0))
    duplex = Link(100.0, 100.0, 200.0)
    turns = Link(100.0, 100.0, 100.0)
    first = ran(sizes, uses, machine(300, link=duplex), leaves)
    second = ran(sizes, uses, machine(300, link=turns), leaves)
    assert first.seconds == pytest.approx(3.0)
    assert second.seconds == pytest.approx(4.0)


def test_a_use_that_cannot_fit_is_refused_with_need_and_have() -> None:
    with pytest.raises(BudgetError, match=r"300 bytes.*200 bytes"):
        ran([100] * 3, [use(0, 1, 2)], machine(200))


SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=8)


@st.composite
def strings(draw: st.DrawFn) -> tuple[list[int], list[Use], int]:
    """Draw sizes, a string over them that keeps the rules, and a capacity it can run in."""
    sizes = draw(SIZES)
    alive: set[int] = set(range(len(sizes) // 2))
    uses = []
    for _ in range(draw(st.integers(1, 25))):
        regions = (
            set(draw(st.lists(st.sampled_from(sorted(alive)), max_size=3))) if alive else set()
        )
        fresh = sorted(set(range(len(sizes))) - alive)
        creates = set(draw(st.lists(st.sampled_from(fresh), max_size=2))) if fresh else set()
        touched = sorted(regions | creates)
        frees = draw(st.lists(st.sampled_from(touched), unique=True, max_size=1)) if touched else []
        writes = [region for region in sorted(regions) if draw(st.booleans())]
        seconds = draw(st.floats(0, 2))
        uses.append(
            Use(
                tuple(sorted(regions)), tuple(sorted(creates)), tuple(frees), seconds, tuple(writes)
            )
        )
        alive = (alive | creates) - set(frees)
    largest = max(sum(sizes[r] for r in {*u.regions, *u.creates}) for u in uses)
    capacity = draw(st.integers(max(1, largest), max(1, sum(sizes))))
    return sizes, uses, capacity


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(strings(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_no_run_does_less_than_it_must(
    string: tuple[list[int], list[Use], int], ahead: bool, overlap: bool, workers: int
) -> None:
    """What is not created is read at least once, and the fast memory is never passed."""
    sizes, uses, capacity = string
    on = machine(capacity, overlap=overlap, workers=workers)
    execution = Execution(list(sizes), on)
    execution.place(range(len(sizes) // 2))
    followed = None
    if ahead:
        schedule = LookAhead().plan(uses, sizes, capacity, [])
        followed = PlanCursor(uses, schedule.actions)
    result = execution.step(uses, followed)
    read, _ = least_bytes(uses, sizes, capacity)
    work = sum(use.seconds for use in uses)
    resident = sum(sizes[r] for r in range(len(sizes)) if execution.state[r] is not State.ABSENT)
    assert result.peak_bytes <= capacity
    assert resident <= capacity
    assert result.bytes_in >= read
    assert result.seconds >= max(work, read / LINK.read_bps) - 1e-6
    if not ahead:  # else a write that was begun early may end after the step
        whole = least_seconds(uses, sizes, capacity, LINK.read_bps, LINK.write_bps)
        assert result.seconds >= whole - 1e-6
    assert result.compute_s == pytest.approx(work)
    if not overlap:
        assert result.seconds >= result.compute_s + result.bytes_in / LINK.read_bps - 1e-6
