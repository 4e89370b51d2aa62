"""The bound holds for every plan, and where regions are of one size some plan reaches it."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.errors import BudgetError, ConfigError
from dynoffload.planning import Kind, LookAhead, PhaseBound, Use, bound, phase_bound


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


@given(
    problem=phases(max_uses=40, max_regions=12),
    window=st.sampled_from([0.0, 0.2, 1.0]),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=300, deadline=None)
def test_schedules_stay_above_it_in_every_phase(
    problem: tuple[list[Use], list[int], int], window: float, cuts: tuple[float, float]
) -> None:
    """Carried out at the latest moments, so that no phase profits from another's fetches."""
    uses, sizes, capacity = problem
    first, second = sorted(int(cut * len(uses)) for cut in cuts)
    schedule = LookAhead(window).plan(uses, sizes, capacity, [])
    total_in = total_out = 0
    for start, stop in [(0, first), (first, second), (second, len(uses))]:
        least = phase_bound(uses[start:stop], sizes, capacity)
        total_in += least.bytes_in
        total_out += least.bytes_out
        fetched = sum(
            sizes[action.region]
            for action in schedule.actions
            if action.kind is Kind.FETCH
            and start <= schedule.next_use(action.region, action.position) < stop
        )
        assert least.bytes_in <= fetched + capacity
    assert total_in <= schedule.bytes_in
    assert total_out <= schedule.bytes_out


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
    uses = [*forward, *backward]
    cuts = [(0, 4), (4, 8)]
    assert bound(uses, sizes, 25, 1.0, 1.0, cuts) == 15.0 + 25.0
    assert bound(uses, sizes, 25, 1.0, 1.0, cuts, shared_link=True) == 15.0 + 50.0
    assert bound(uses, sizes, 25, 10.0, 10.0, cuts) == 4.0 + 8.0
    assert bound(uses, sizes, 80, 1e-3, 1e-3, cuts) == 4.0 + 8.0


def test_it_refuses_what_cannot_run_or_be_meant() -> None:
    uses = [Use((0,)), Use((0, 1))]
    with pytest.raises(BudgetError, match=r"use 1 .*\(9 bytes\).*\(8 bytes\)"):
        bound(uses, [4, 5], 8, 1.0, 1.0, [(0, 1), (1, 2)])
    with pytest.raises(ConfigError, match="bandwidths"):
        bound(uses, [4, 5], 9, 0.0, 1.0, [(0, 2)])
    for phases_ in ([(0, 3)], [(0, 2), (1, 2)], [(1, 0)]):
        with pytest.raises(ConfigError, match="without overlap"):
            bound(uses, [4, 5], 9, 1.0, 1.0, phases_)
