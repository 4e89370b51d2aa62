"""How the number of parts and the strategy are chosen, fed with times, and the memory that bounds
it; without other processes."""

from __future__ import annotations

import gc
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynoffload.errors import ConfigError
from dynoffload.experiments.allocations import Allocations
from dynoffload.moe.parallel import ExpertParallel, Strategy
from dynoffload.moe.parallel.choice import MORE, NUMBERS, ROUNDS, Choice, Chooser, quickest
from dynoffload.moe.parallel.memory import Shape, memory, shape_of

WORK = list(Strategy)


@given(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=10))
def test_without_noise_the_quickest_is_kept_or_less_work_that_is_as_quick(
    costs: list[float],
) -> None:
    kept = quickest(range(len(costs)), lambda one: costs[one])
    assert costs[kept] <= min(costs) / MORE
    assert all(costs[kept] < cost for cost in costs[:kept])


def test_noise_misses_seldom() -> None:
    missed = 0
    for seed in range(100):
        noise = Random(seed).lognormvariate
        kept = quickest(range(8), lambda one, n=noise: (1 + 0.1 * abs(one - 5)) * n(0, 0.05))  # type: ignore[misc]
        missed += kept not in (4, 5, 6)
    assert missed <= 2


def shape_at(tokens: int) -> Shape:
    return Shape(tokens, tokens, tokens, 64, 256, 1, 4)


def chosen(found: Chooser, tokens: int) -> tuple[Choice, list[Choice]]:
    """Return the choice for a batch, and what was tried: least time take 4 parts and less work."""
    tried: list[Choice] = []

    def seconds(choice: Choice) -> float:
        tried.append(choice)
        parts = 1 + 0.2 * abs(NUMBERS.index(choice.parts) - 2)
        return parts * (1 + 0.1 * WORK.index(choice.strategy))

    return found.choose(shape_at(tokens), seconds), tried


def test_numbers_are_tried_then_strategies_once_for_sizes_within_a_factor_of_two() -> None:
    found = Chooser()
    best, tried = chosen(found, 4096)
    assert best == (4, Strategy.NONE)
    assert {one.parts for one in tried if one.strategy is Strategy.NONE} == set(NUMBERS)
    others = {one for one in tried if one.strategy is not Strategy.NONE}
    assert others == {Choice(4, strategy) for strategy in WORK[1:]}
    assert len(tried) <= 2 * 5 * ROUNDS
    for size in (4096, 2049):
        assert chosen(found, size) == (best, [])
    assert chosen(found, 4097)[1]


def test_what_is_given_is_not_chosen() -> None:
    _, tried = chosen(Chooser(numbers=(8,)), 64)
    assert {one.parts for one in tried} == {8}
    _, tried = chosen(Chooser(strategies=(Strategy.S4,)), 64)
    assert {one.strategy for one in tried} == {Strategy.S4}


def test_a_limit_holds_for_every_size() -> None:
    limit = memory(Strategy.NONE, 2, shape_at(2500))
    found = Chooser(limit=limit)
    assert chosen(found, 2500)[0] == (4, Strategy.NONE)
    best, tried = chosen(found, 4000)  # of the same class, where that does not fit
    assert best.strategy is not Strategy.NONE
    assert not tried
    _, tried = chosen(Chooser(limit=limit), 4000)
    for one in (best, *tried):
        assert memory(one.strategy, one.parts, shape_at(4000)) <= limit
    with pytest.raises(ConfigError, match=r"memory=.* is too little for a batch of 4096 token"):
        chosen(Chooser(limit=1000), 4096)


def test_memory_bounds_only_what_is_chosen() -> None:
    with pytest.raises(ConfigError, match="memory= bounds what is 'auto'"):
        ExpertParallel(4, 4, 2, parts=2, memory="1MB")
    with pytest.raises(ConfigError, match="parts='all' is neither"):
        ExpertParallel(4, 4, 2, parts="all")


def test_where_nothing_goes_backward_nothing_is_chosen() -> None:
    layer = ExpertParallel(8, 16, 4, 2, parts="auto", strategy="auto").requires_grad_(False)
    layer(torch.randn(64, 8))
    assert layer.choice == (1, Strategy.NONE)


@pytest.mark.parametrize("parts", [(1, 8), (1, 2, 8)])
def test_memory_differs_as_allocations_do(parts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    length, width, hidden = 2048, 64, 256
    layer = ExpertParallel(width, hidden, 4, 2)
    shape = shape_of(length, 2, 4, 1, width, hidden, layer.activation.parts, 4)
    tokens = torch.randn(length, width, requires_grad=True)
    apart, whole = {}, memory(Strategy.NONE, 1, shape)
    for strategy in Strategy:
        for count in parts:
            layer.set_pipeline(count, strategy.value)
            layer.zero_grad()
            gc.collect()
            with Allocations() as watch:
                layer(tokens).hidden.sum().backward()
            apart[count, strategy] = watch.peak - memory(strategy, count, shape)
    # What the router, index structures, the result, and gradients of weights take is the same.
    assert max(apart.values()) - min(apart.values()) < 0.1 * whole, apart
