"""The cost model, the search for the number of parts, and the choice of both, without processes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import pytest
import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments.allocations import Allocations
from dynoffload.moe.parallel import ExpertParallel, Strategy
from dynoffload.moe.parallel.choice import Choice, Chooser
from dynoffload.moe.parallel.cost import CostModel, Shape, Speed, memory, shape_of, work
from dynoffload.moe.parallel.granularity import Granularity, Trial
from dynoffload.moe.parallel.race import ROUNDS, Race

SHAPE = Shape(tokens=1000, rows=1000, pairs=1000, width=64, hidden=256, first=1, itemsize=4)


@pytest.mark.parametrize(
    ("strategy", "forward", "backward"),
    [
        ("none", (2, 2, 0), (4, 2, 0)),
        ("S1", (2, 2, 5), (4, 2, 5)),
        ("S2", (2, 2, 4), (4, 3, 4)),
        ("S3", (2, 2, 1), (5, 2, 1)),
        ("S4", (2, 2, 0), (5, 3, 0)),
    ],
)
def test_work_is_the_papers(
    strategy: str, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    product, row = 1000 * 64 * 256, 1000 * 64 * 4
    for wanted, back in ((forward, False), (backward, True)):
        found = work(Strategy(strategy), SHAPE, backward=back)
        assert (found.compute, found.communication, found.copy) == (
            wanted[0] * product,
            wanted[1] * row,
            wanted[2] * row,
        )


def test_rows_are_tokens_that_have_an_expert_on_a_rank() -> None:
    assert shape_of(1000, 1, 8, 4, 64, 256, 1, 4).rows == 1000
    assert shape_of(1000, 2, 4, 2, 64, 256, 1, 4).rows == round(2000 * (1 - 1 / 6))
    assert shape_of(1000, 8, 8, 2, 64, 256, 1, 4).rows == 2000
    assert shape_of(1000, 2, 4, 1, 64, 256, 1, 4).pairs == 2000


def test_a_speed_is_linear_between_its_volumes() -> None:
    speed = Speed(((100.0, 10.0), (300.0, 10.0)))  # 10 and 30 a second
    assert speed.seconds(0) == 0
    assert speed.seconds(50) == 5
    assert speed.seconds(200) == 10
    assert speed.seconds(600) == 20


def test_the_slowest_of_three_decides() -> None:
    product, row = 1000 * 64 * 256, 1000 * 64 * 4

    def model(compute: float, communication: float, copy: float, beside: float = 1.0) -> CostModel:
        return CostModel(
            Speed(((product, compute),)),
            Speed(((row, communication),)),
            Speed(((row, copy),)),
            communication_beside=beside,
        )

    alone = model(1.0, 1.0, 0.0)
    assert alone.seconds(Strategy.NONE, 1, SHAPE) == pytest.approx(6 + 4)
    # Four parts: forward 2/4 of each, backward 4/4 computing and 2/4 communication.
    assert alone.seconds(Strategy.NONE, 4, SHAPE) == pytest.approx(
        (0.5 + 3 * 0.5 + 0.5) + (0.5 + 3 * 1 + 1)
    )
    slow = model(0.1, 1.0, 0.0, beside=2.0)
    assert slow.seconds(Strategy.NONE, 2, SHAPE) == pytest.approx(1 + 2 + 0.1 + 1 + 2 + 0.2)
    copies = model(0.1, 0.1, 1.0)
    assert copies.seconds(Strategy.S4, 4, SHAPE) < copies.seconds(Strategy.S3, 4, SHAPE)
    assert copies.seconds(Strategy.S3, 4, SHAPE) < copies.seconds(Strategy.S2, 4, SHAPE)
    links = model(0.1, 1.0, 0.01)
    assert links.seconds(Strategy.S3, 4, SHAPE) < links.seconds(Strategy.S4, 4, SHAPE)


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
            for _ in range(3):  # what is copied stays until it is, which a busy disk puts off
                layer.zero_grad()
                gc.collect()
                with Allocations() as watch:
                    layer(tokens).hidden.sum().backward()
                peaks.append(watch.peak)
            apart[parts, strategy] = min(peaks) - memory(strategy, parts, shape)
            whole = max(min(peaks), memory(Strategy.NONE, 1, shape))
    # What the router, index structures, the result, and gradients of weights take is the same.
    assert max(apart.values()) - min(apart.values()) < 0.1 * whole, apart


# The search


def best_of(bounds: list[tuple[int, int]]) -> tuple[Trial, list[tuple[int, int]]]:
    """Return trials in a world whose best numbers are ``(up to size, number)``."""
    asked: list[tuple[int, int]] = []

    def trial(size: int, number: int) -> float:
        asked.append((size, number))
        wanted = next(n for upto, n in bounds if size <= upto)
        return size * (1 + abs(number - wanted) / 10)

    return trial, asked


def test_ranges_are_found_widened_and_put_between() -> None:
    trial, asked = best_of([(8, 2), (22, 4), (1 << 30, 8)])
    search = Granularity()

    def parts(size: int) -> int:
        found = search.find(size, trial)
        assert found is not None
        return found.parts

    assert parts(4) == 2
    assert asked == [(4, 1), (4, 2), (4, 4)]  # it stops where it gets slower
    asked.clear()
    assert parts(40) == 8
    assert asked == [(40, 2), (40, 4), (40, 8), (40, 16)]  # from its neighbour's number on
    asked.clear()
    assert parts(10) == 4
    assert asked == [(10, 2), (10, 4), (10, 8)]  # between both neighbours'
    assert [(one.low, one.high, one.parts) for one in search.ranges] == [
        (4, 4, 2), (10, 10, 4), (40, 40, 8),
    ]  # fmt: skip
    assert (parts(20), parts(7), parts(30)) == (4, 2, 8)
    asked.clear()
    assert [parts(size) for size in (5, 15, 35)] == [2, 4, 8]  # within ranges nothing is tried
    assert asked == []
    assert [(one.low, one.high, one.parts) for one in search.ranges] == [
        (4, 7, 2), (10, 20, 4), (30, 40, 8),
    ]  # fmt: skip


def test_between_neighbours_of_one_number_one_trial_joins_them() -> None:
    trial, asked = best_of([(1 << 30, 4)])
    search = Granularity()
    search.find(10, trial)
    search.ranges.append(type(search.ranges[0])(100, 100, 4, 1.0))
    asked.clear()
    search.find(50, trial)
    assert asked == [(50, 4)]
    assert [(one.low, one.high) for one in search.ranges] == [(10, 100)]


def test_numbers_that_cannot_be_are_passed_over() -> None:
    found = Granularity().find(10, lambda _, number: None if number < 4 else float(number))
    assert found is not None
    assert found.parts == 4
    assert Granularity().find(10, lambda *_: None) is None


# The choice


def shape_at(tokens: int) -> Shape:
    return Shape(tokens, tokens, tokens, 64, 256, 1, 4)


def chooser(
    limit: int | None = None, copy: float = 1e-9, wrong: dict[Choice, float] | None = None
) -> tuple[Chooser, list[Choice], Callable[[int, Choice], float]]:
    """Return a chooser, its trials, and how long its steps take: as the model says, or otherwise
    by so many times where it is ``wrong``."""
    model = CostModel(Speed(((1e6, 1e-3),)), Speed(((1e6, 1e-3),)), Speed(((1e6, copy * 1e6),)))
    tried: list[Choice] = []

    def seconds(tokens: int, choice: Choice) -> float:
        took = model.seconds(choice.strategy, choice.parts, shape_at(tokens))
        return took * (1 + 0.01 * choice.parts) * (wrong or {}).get(choice, 1.0)

    def trial(choice: Choice) -> float:
        tried.append(choice)
        return seconds(4096, choice)

    return Chooser(model, shape_at, trial, limit=limit), tried, seconds


def run(
    found: Chooser, sizes: Iterable[int], seconds: Callable[[int, Choice], float]
) -> list[tuple[int, Choice]]:
    """Return the choices of steps."""
    steps = []
    for size in sizes:
        choice, timed = found.turn(size)
        steps.append((size, choice))
        if timed:
            found.record(size, choice, seconds(size, choice))
    return steps


def test_without_a_limit_all_is_kept_and_the_end_is_the_end() -> None:
    found, tried, seconds = chooser()
    run(found, [4096] * 400, seconds)
    assert found.settled
    choice, timed = found.turn(4096)
    assert not timed
    assert choice.strategy is Strategy.NONE
    assert len(tried) == found.trials <= 5  # one strategy's numbers, once each
    assert found.laps <= 10 * ROUNDS
    count = found.laps
    assert {one for _, one in run(found, [4096] * 20, seconds)} == {choice}
    assert (found.laps, len(tried)) == (count, found.trials)


def test_what_races_has_one_part_and_some_of_each_strategy_whatever_the_model_says() -> None:
    found, _, seconds = chooser(copy=1.0)  # copies are hopeless
    steps = [one for _, one in run(found, [4096] * 100, seconds)]
    assert Choice(1, Strategy.NONE) in steps
    assert {one.strategy for one in steps} == set(Strategy)
    assert len(set(steps)) <= 9
    assert all(steps.count(one) == 2 for one in steps if one.strategy.offloads)


@pytest.mark.parametrize("strategy", list(Strategy))
def test_where_the_model_is_wrong_steps_set_it_right(strategy: Strategy) -> None:
    numbers = (1, 2, 4, 8, 16)
    found, _, seconds = chooser(copy=1e-11, wrong={Choice(n, strategy): 0.7 for n in numbers})
    run(found, [4096] * 400, seconds)
    choice, timed = found.turn(4096)
    assert (choice.strategy, timed) == (strategy, False)


def test_sizes_that_vary_share_a_race_and_count_by_their_tokens() -> None:
    found, tried, seconds = chooser()
    sizes = [1025 + (977 * step) % 3072 for step in range(600)]  # to 4,096
    run(found, sizes, seconds)
    assert found.settled
    assert len(tried) <= 10
    assert found.laps <= 2 * 10 * ROUNDS
    last = {found.turn(size).choice for size in sizes[-100:]}
    for one in last:
        every = [Choice(n, s) for n in (1, 2, 4, 8, 16) for s in Strategy]
        least = min(seconds(3000, other) for other in every)
        assert seconds(3000, one) <= 1.05 * least


def test_a_limit_makes_it_reuse_buffers_by_what_is_cheapest() -> None:
    limit = memory(Strategy.NONE, 8, shape_at(4096)) * 7 // 10
    for copy in (1e-12, 1e-3):
        found, tried, seconds = chooser(limit, copy)
        raced = [one for _, one in run(found, [4096] * 300, seconds)]
        choice = found.turn(4096).choice
        assert choice.strategy is not Strategy.NONE
        assert choice.strategy.offloads == (copy < 1e-6)
        for one in (*tried, *raced):
            assert memory(one.strategy, one.parts, shape_at(4096)) <= limit


def test_a_limit_holds_for_every_size_of_a_race() -> None:
    limit = memory(Strategy.NONE, 2, shape_at(3000))
    found, _, seconds = chooser(limit, 1e-12)
    steps = run(found, [2100 + (613 * step) % 1997 for step in range(400)], seconds)
    assert found.settled
    for size, one in steps:
        assert memory(one.strategy, one.parts, shape_at(size)) <= limit
    assert {one.strategy for size, one in steps if size < 2200} > {Strategy.NONE}


def test_a_race_of_what_does_not_fit_gives_way_to_the_model() -> None:
    found, _, seconds = chooser(memory(Strategy.S4, 8, shape_at(4096)))
    found._races[4096] = Race([Choice(1, Strategy.NONE), Choice(2, Strategy.NONE)])
    ((_, choice),) = run(found, [4096], seconds)
    assert memory(choice.strategy, choice.parts, shape_at(4096)) <= memory(
        Strategy.S4, 8, shape_at(4096)
    )
    assert found.laps == 0


def test_a_limit_that_is_too_small_is_refused() -> None:
    found, _, _ = chooser(1000)
    with pytest.raises(ConfigError, match=r"memory=.* is too little for a batch of 4096 tokens"):
        found.turn(4096)


def test_memory_bounds_only_what_is_chosen() -> None:
    with pytest.raises(ConfigError, match="memory= bounds what is 'auto'"):
        ExpertParallel(4, 4, 2, parts=2, memory="1MB")
    with pytest.raises(ConfigError, match="parts='all' is neither"):
        ExpertParallel(4, 4, 2, parts="all")
