"""The race of choices, fed with times, and the memory that bounds it; without processes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynoffload.errors import ConfigError
from dynoffload.experiments.allocations import Allocations
from dynoffload.moe.parallel import ExpertParallel, Strategy
from dynoffload.moe.parallel.choice import NUMBERS, Choice, Chooser
from dynoffload.moe.parallel.memory import Shape, memory, shape_of
from dynoffload.moe.parallel.race import MORE, ROUNDS, Race

COSTS = st.lists(st.floats(0.5, 3.0), min_size=1, max_size=10)


def run(race: Race[int], seconds: Callable[[int], float]) -> int:
    """Return how many steps a race took until it was settled."""
    steps = 0
    while (one := race.turn()) is not None:
        race.record(one, seconds(one))
        steps += 1
    assert race.settled
    return steps


@given(COSTS)
def test_without_noise_the_quickest_is_kept_or_less_work_that_is_as_quick(
    costs: list[float],
) -> None:
    race = Race(range(len(costs)))
    run(race, lambda one: costs[one])
    kept = race.best()
    assert kept is not None
    assert costs[kept] <= min(costs) / MORE
    assert all(costs[kept] < cost for cost in costs[:kept])


@given(COSTS, st.data())
def test_it_ends_whatever_it_is_told(costs: list[float], data: st.DataObject) -> None:
    race = Race(range(len(costs)))
    steps = run(race, lambda one: data.draw(st.floats(1e-6, 1e6)))
    assert steps <= len(costs) * ROUNDS
    assert race.timed_steps == steps
    assert race.best() is not None


@given(COSTS, st.data())
def test_told_the_same_all_decide_alike(costs: list[float], data: st.DataObject) -> None:
    one, other = Race(range(len(costs))), Race(range(len(costs)))
    while (turn := one.turn()) is not None:
        assert other.turn() == turn
        seconds = data.draw(st.floats(0.5, 2.0))
        for race in (one, other):
            race.record(turn, seconds)
        assert one.running == other.running
    assert other.settled
    assert one.best() == other.best()


def test_what_is_far_behind_has_few_turns() -> None:
    race, seen = Race(range(8)), [0] * 8

    def seconds(one: int) -> float:
        seen[one] += 1
        return 1.0 if one < 2 else 2.0

    run(race, seconds)
    assert seen == [ROUNDS, ROUNDS, 2, 2, 2, 2, 2, 2]


def test_a_noisy_machine_takes_more_turns_and_the_kept_one_is_near() -> None:
    steps = {}
    for noise, misses in ((0.02, 0), (0.2, 15)):
        counts, missed = [], 0
        for seed in range(100):
            random, race = Random(seed), Race(range(8))

            def seconds(one: int, random: Random = random, noise: float = noise) -> float:
                return (1 + 0.05 * abs(one - 5)) * random.lognormvariate(0, noise)

            counts.append(run(race, seconds))
            missed += race.best() not in (4, 5, 6)
        assert missed <= misses
        steps[noise] = sum(counts) / len(counts)
    assert 2 * steps[0.02] < steps[0.2] < 8 * ROUNDS


def test_who_cannot_is_passed_over() -> None:
    race = Race(range(3))
    for _ in range(3 * ROUNDS):  # 0 never can
        one = race.turn(lambda one: one > 0)
        if one is None:
            break
        race.record(one, 1.0 + one)
    assert race.best() == 1
    assert race.best(lambda one: one != 1) == 2  # it has dropped out, and is what is known
    assert race.best(lambda one: False) is None
    assert race.turn(lambda one: False) is None


def test_a_turn_that_was_not_made_comes_again() -> None:
    race = Race(range(3))
    assert race.turn() == race.turn() == 0
    race.record(2, 1.0)
    assert race.turn() == 0
    race.record(2, 1.0)  # it has had its turn in this round
    assert race.timed_steps == 1


# The choice of a layer

WORK = list(Strategy)


def shape_at(tokens: int) -> Shape:
    return Shape(tokens, tokens, tokens, 64, 256, 1, 4)


def seconds(tokens: int, choice: Choice) -> float:
    """Return how long steps take: least with 4 parts, and each strategy a tenth longer."""
    parts = 1 + 0.2 * abs(NUMBERS.index(choice.parts) - 2)
    return tokens * parts * (1 + 0.1 * WORK.index(choice.strategy))


def chosen(
    found: Chooser, sizes: Iterable[int], took: Callable[[int, Choice], float] = seconds
) -> list[tuple[int, Choice]]:
    """Return the choices of steps."""
    steps = []
    for size in sizes:
        choice, timed = found.turn(size)
        steps.append((size, choice))
        if timed:
            found.record(size, choice, took(size, choice))
    return steps


def test_numbers_race_then_strategies_and_the_end_is_the_end() -> None:
    found = Chooser(shape_at)
    steps = [one for _, one in chosen(found, [4096] * 300)]
    assert steps[:5] == [Choice(number, Strategy.NONE) for number in NUMBERS]
    assert {one for one in steps if one.strategy is not Strategy.NONE} == {
        Choice(4, strategy) for strategy in WORK[1:]
    }
    assert found.settled
    count = found.timed_steps
    assert count <= 2 * 5 * ROUNDS
    assert {one for _, one in chosen(found, [4096] * 20)} == {Choice(4, Strategy.NONE)}
    assert found.timed_steps == count


def test_what_is_given_does_not_race() -> None:
    found = Chooser(shape_at, numbers=(8,))
    assert {one.parts for _, one in chosen(found, [64] * 150)} == {8}
    assert found.settled
    found = Chooser(shape_at, strategies=(Strategy.S4,))
    assert {one.strategy for _, one in chosen(found, [64] * 150)} == {Strategy.S4}
    assert found.settled


def test_sizes_that_vary_share_a_race_and_count_by_their_tokens() -> None:
    found = Chooser(shape_at)
    sizes = [1025 + (977 * step) % 3072 for step in range(600)]  # to 4,096
    chosen(found, sizes)
    assert found.settled
    assert found.timed_steps <= 2 * 2 * 5 * ROUNDS
    assert {found.turn(size)[0] for size in sizes} == {Choice(4, Strategy.NONE)}


def test_a_limit_holds_for_every_size_of_a_race() -> None:
    limit = memory(Strategy.NONE, 2, shape_at(3000))
    found = Chooser(shape_at, limit=limit)
    steps = chosen(found, [2100 + (613 * step) % 1997 for step in range(400)])
    assert found.settled
    for size, one in steps:
        assert memory(one.strategy, one.parts, shape_at(size)) <= limit
    assert {one.strategy for _, one in steps} == set(WORK)
    assert {one.strategy for size, one in steps if size > 4000} <= set(WORK[1:])


def test_a_limit_that_is_too_small_is_refused() -> None:
    for limit in (0, 1000):
        with pytest.raises(ConfigError, match=r"memory=.* is too little for a batch of 4096 token"):
            Chooser(shape_at, limit=limit).turn(4096)


def test_memory_bounds_only_what_is_chosen() -> None:
    with pytest.raises(ConfigError, match="memory= bounds what is 'auto'"):
        ExpertParallel(4, 4, 2, parts=2, memory="1MB")
    with pytest.raises(ConfigError, match="parts='all' is neither"):
        ExpertParallel(4, 4, 2, parts="all")


# Memory


@pytest.mark.parametrize(("activation", "k"), [("silu", 1), ("swiglu", 2)])
def test_memory_differs_as_allocations_do(activation: str, k: int) -> None:
    torch.manual_seed(0)
    length, width, hidden = 4096, 64, 256
    layer = ExpertParallel(width, hidden, 4, k, activation=activation)
    shape = shape_of(length, k, 4, 1, width, hidden, layer.activation.parts, 4)
    tokens = torch.randn(length, width, requires_grad=True)
    apart = {}
    for strategy in Strategy:
        for parts in (1, 2, 4, 8):
            layer.set_pipeline(parts, strategy.value)
            peaks = []
            # What is copied stays until it is, which a busy disk puts off.
            for _ in range(3 if strategy.offloads else 1):
                layer.zero_grad()
                gc.collect()
                with Allocations() as watch:
                    layer(tokens).hidden.sum().backward()
                peaks.append(watch.peak)
            apart[parts, strategy] = min(peaks) - memory(strategy, parts, shape)
            whole = max(min(peaks), memory(Strategy.NONE, 1, shape))
    # What the router, index structures, the result, and gradients of weights take is the same.
    assert max(apart.values()) - min(apart.values()) < 0.1 * whole, apart
