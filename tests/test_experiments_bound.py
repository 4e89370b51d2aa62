"""The bound holds for every plan, is reached for equal sizes, and is that counted by hand."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.errors import BudgetError
from dynoffload.experiments.bound import (
    PhaseBound,
    StepString,
    StepVisit,
    phase_bound,
    step_bound,
    step_string,
)
from dynoffload.planning.schedule import Use
from dynoffload.simulation.machine import Link

MB = 10**6
FOUR = dict.fromkeys("abcd", MB)
FAST = Link(1e9, 1e9, 2e9)
DUPLEX = Link(1e6, 1e6, 2e6)
TURNS = Link(1e6, 1e6, 1e6)


@st.composite
def phases(
    draw: st.DrawFn, max_uses: int, max_regions: int, *, equal: bool = False
) -> tuple[list[Use], list[int], int]:
    """Draw uses, sizes and a capacity that holds each use."""
    length, count = draw(st.integers(1, max_uses)), draw(st.integers(1, max_regions))
    chance = random.Random(draw(st.integers(0, 2**32)))
    sizes = [1 if equal else chance.randrange(1, 8) for _ in range(count)]
    dead: set[int] = set()
    uses = []
    for _ in range(length):
        regions = {*chance.choices(range(count), k=chance.randrange(1, 3))}
        creates = (regions & dead) | {r for r in regions if chance.random() < 0.15}
        dead -= creates
        frees = {r for r in regions if chance.random() < 0.15}
        dead |= frees
        writes = {r for r in regions if chance.random() < 0.3}
        uses.append(Use(tuple(regions), tuple(creates), tuple(frees), 0.0, tuple(writes)))
    need = max(sum(sizes[region] for region in use.regions) for use in uses)
    return uses, sizes, need + chance.choice([0, 1, 3, 8])


def subsets(regions: Collection[int]) -> Iterator[frozenset[int]]:
    """Yield every subset."""
    ordered = sorted(regions)
    for bits in range(1 << len(ordered)):
        yield frozenset(r for place, r in enumerate(ordered) if bits >> place & 1)


def every_plan(
    uses: Sequence[Use], sizes: Sequence[int], capacity: int
) -> dict[tuple[frozenset[int], frozenset[int]], set[tuple[int, int]]]:
    """Return (resident, dirty) -> {(read, written)} over all plans that start with what they like.

    Fetching on demand loses no generality for bytes: a plan that fetches earlier reads the same.
    """

    def size(regions: Collection[int]) -> int:
        return sum(sizes[region] for region in regions)

    states = {
        (held, frozenset[int]()): {(0, 0)}
        for held in subsets(range(len(sizes)))
        if size(held) <= capacity
    }
    for use in uses:
        after: dict[tuple[frozenset[int], frozenset[int]], set[tuple[int, int]]] = {}
        needed, created = frozenset(use.regions), frozenset(use.creates)
        for (held, dirty), costs in states.items():
            reads = size(needed - created - held)
            for gone in subsets(held - needed):
                now = (held - gone) | needed
                if size(now) > capacity:
                    continue
                writes = size(gone & dirty)
                unsaved = ((dirty - gone) | created | frozenset(use.writes)) - frozenset(use.frees)
                state = (now - frozenset(use.frees), unsaved)
                after.setdefault(state, set()).update(
                    (read + reads, written + writes) for read, written in costs
                )
        states = after
    return states


@given(problem=phases(max_uses=7, max_regions=4))
@settings(max_examples=150, deadline=None)
def test_no_plan_of_one_phase_moves_less(problem: tuple[list[Use], list[int], int]) -> None:
    uses, sizes, capacity = problem
    least = phase_bound(uses, sizes, capacity)
    costs = set.union(*every_plan(uses, sizes, capacity).values())
    assert least.bytes_in <= min(read for read, _ in costs)
    assert least.bytes_out <= min(written for _, written in costs)


@given(problem=phases(max_uses=8, max_regions=4, equal=True))
@settings(max_examples=100, deadline=None)
def test_for_equal_sizes_some_plan_reads_no_more(
    problem: tuple[list[Use], list[int], int],
) -> None:
    uses, sizes, capacity = problem
    costs = set.union(*every_plan(uses, sizes, capacity).values())
    assert phase_bound(uses, sizes, capacity).bytes_in == min(read for read, _ in costs)


def test_it_counts_by_hand() -> None:
    """Four weights of 10 bytes, 25 bytes of memory: forward, then backward, gradients stay."""
    forward = [Use((weight,), seconds=1.0) for weight in range(4)]
    backward = [Use((w, w + 4), creates=(w + 4,), seconds=2.0) for w in reversed(range(4))]
    sizes = [10] * 8
    # Forward: 25 of 40 bytes may be resident from before. Backward: beside each weight and its
    # gradient (20 bytes) 5 bytes remain: in the first use for weights to come, of which 25 bytes
    # are read later; in the last use for gradients that were made, of which 25 are written before.
    assert phase_bound(forward, sizes, 25) == PhaseBound(4.0, 15, 0)
    least = phase_bound(backward, sizes, 25)
    assert least == PhaseBound(8.0, 30 - 5, 30 - 5)
    assert least.seconds(1.0, 1.0) == 25.0
    assert least.seconds(1.0, 1.0, shared_link=True) == 50.0
    assert least.seconds(10.0, 10.0) == 8.0


def test_a_use_that_cannot_run_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"use 1 .*\(9 bytes\).*\(8 bytes\)"):
        phase_bound([Use((0,)), Use((0, 1))], [4, 5], 8)


def chain(saved: int = 0) -> StepString:
    return step_string([StepVisit((name,), saved) for name in FOUR], FOUR)


def test_on_a_shared_link_reads_and_writes_take_turns() -> None:
    assert TURNS.in_turns
    assert not DUPLEX.in_turns
    turns = step_bound(chain(), 4 * MB, TURNS, 0.0, 0.0)
    duplex = step_bound(chain(), 4 * MB, DUPLEX, 0.0, 0.0)
    moved = (turns.forward, turns.backward)
    assert turns.seconds == sum(phase.bytes_in + phase.bytes_out for phase in moved) / 1e6
    assert turns.spread_s <= turns.seconds
    assert turns.overlapped_s == duplex.overlapped_s == duplex.seconds < turns.seconds


def test_a_shared_parameter_is_updated_once_and_its_gradient_grows() -> None:
    string = step_string([StepVisit(("a",), 0), StepVisit(("a",), 0)], FOUR)
    first, second = string.forward
    assert len(first.writes) == 2
    assert second.writes == ()
    later = string.backward[1]
    assert set(later.writes) == set(string.backward[0].creates)
