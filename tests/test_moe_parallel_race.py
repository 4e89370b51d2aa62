"""The race of choices, fed with times."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

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


@given(COSTS, st.randoms(use_true_random=False), st.floats(0.0, 0.03))
def test_the_kept_one_is_within_the_noise_of_the_best(
    costs: list[float], random: Random, noise: float
) -> None:
    race = Race(range(len(costs)))
    run(race, lambda one: costs[one] * (1 + random.uniform(0.0, noise)))
    kept = race.best()
    assert kept is not None
    assert costs[kept] <= min(costs) * (1 + noise) / MORE


@given(COSTS, st.data())
def test_it_ends_whatever_it_is_told(costs: list[float], data: st.DataObject) -> None:
    race = Race(range(len(costs)))
    steps = run(race, lambda one: data.draw(st.floats(1e-6, 1e6)))
    assert steps <= len(costs) * ROUNDS
    assert race.laps == steps
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


def test_one_slow_step_does_not_put_the_best_out() -> None:
    race, seen = Race(range(4)), [0] * 4

    def seconds(one: int) -> float:
        seen[one] += 1
        return 9.0 if one == 3 and seen[3] in (1, 4, 8) else 1.0 + 0.1 * (3 - one)

    run(race, seconds)
    assert race.best() == 3


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


def test_a_machine_that_becomes_slower_does_so_for_all() -> None:
    race, step = Race(range(5)), 0

    def seconds(one: int) -> float:
        nonlocal step
        step += 1
        return (1.0 + 0.1 * abs(one - 3)) * (1 + 0.02 * step)  # doubles in 50 steps

    run(race, seconds)
    assert race.best() == 3


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
    assert race.laps == 1


def test_one_alone_is_settled() -> None:
    race = Race(["it"])
    assert race.settled
    assert race.turn() is None
    assert race.best() == "it"
