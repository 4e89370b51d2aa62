"""Time of a step by hand on small visits, its bounds on real ones, and its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.simulation.designs import (
    AGGRESSIVE,
    CONSERVATIVE,
    DESIGNS,
    STRATEGIES,
    Placement,
    pooled,
)
from dynoffload.simulation.moe_cluster import Batch, Division, MoeShard, MoeTransformer
from dynoffload.simulation.movement import (
    Order,
    Segments,
    Update,
    Visit,
    ahead,
    buffer_bytes,
    in_turns,
    moved_bytes,
    partly_hidden,
    serial,
    visits,
)
from dynoffload.simulation.roofline import Accelerator, SharedLink

SHARD = MoeShard(
    MoeTransformer(layers=30, hidden=8192, heads=64, experts=128, vocabulary=51200),
    Division(16, 16, 128, 2),
    Batch(2, 2048),
)
SLOW = Accelerator("one byte a second", 1.0, math.inf, SharedLink(1.0), SharedLink(1.0))


def visit(busy: float, fetched: dict[str, float], stored: dict[str, float] | None = None) -> Visit:
    return Visit((), busy, fetched, stored or {})


def test_serial_movement_adds_up() -> None:
    steps = [visit(10, {"a": 4}), visit(3, {"b": 1}, {"c": 2})]
    assert serial(steps, SLOW) == Segments(0, 0, 7, 13)
    assert serial(steps, SLOW).total_s == 20


def test_only_the_first_fetch_is_waited_for_when_compute_is_long() -> None:
    assert ahead([visit(10, {n: 4}) for n in "abc"], SLOW).total_s == 4 + 30


def test_fetching_ahead_waits_for_a_free_buffer() -> None:
    # a: 0-20, runs 20-30. b: 20-40, runs 40-50. c: 40-60, as a's buffer is free since 30.
    assert ahead([visit(10, {n: 20}) for n in "abc"], SLOW).total_s == 70
    # a: 0-1, runs 1-31. b: 1-2. c needs a's buffer: 31-51. Runs of b 31-32 and c 51-52.
    steps = [visit(30, {"a": 1}), visit(1, {"b": 1}), visit(1, {"c": 20})]
    assert ahead(steps, SLOW).total_s == 52


def test_storing_takes_turns_with_fetching_and_ends_the_step() -> None:
    # Run 0: 0-10, stored 10-25. Run 1: 10-20. Run 2 needs c after the store: 25-27, runs 27-37.
    steps = [visit(10, {}, {"x": 15}), visit(10, {}, {"y": 3}), visit(10, {"c": 2}, {"z": 5})]
    # y: 27-30. z: 37-42.
    assert ahead(steps, SLOW).total_s == 42
    assert ahead(steps, SLOW).remote_s == 12


def test_what_neighbours_share_stays() -> None:
    steps = [visit(1, {"w": 7}, {"x": 9}), visit(1, {"w": 7, "x": 9}), visit(1, {"v": 1})]
    assert ahead(steps, SLOW).total_s == 7 + 1 + 1 + 1
    assert buffer_bytes(steps) == 1
    assert moved_bytes(steps) == 7 + 9 + 16 + 1
    assert moved_bytes(steps, ahead=True) == 7 + 1


def test_buffers_hold_what_comes_and_what_leaves() -> None:
    steps = [visit(1, {"a": 5}, {"x": 3}), visit(1, {"b": 7}, {"y": 2}), visit(1, {"c": 11})]
    assert buffer_bytes(steps) == 3 + 11


@pytest.mark.parametrize("order", Order)
def test_bytes_that_cross_follow_the_formula(order: Order) -> None:
    weights = 2 * sum(layer.parameters for layer in SHARD.layers)
    saved = sum(layer.saved for layer in SHARD.layers)
    checkpoints = 30 * SHARD.own
    sweeps = order is Order.SWEEPS
    near = moved_bytes(visits(SHARD, CONSERVATIVE, order))
    assert near == pytest.approx(2 * saved if sweeps else 0)
    far = moved_bytes(visits(SHARD, AGGRESSIVE, order))
    kept = 3 * weights + 2 * saved if sweeps else 2 * weights
    assert far == pytest.approx(kept + 2 * checkpoints)


@pytest.mark.parametrize("order", Order)
def test_both_orders_compute_and_send_the_same(order: Order) -> None:
    found = serial(visits(SHARD, AGGRESSIVE, order), DESIGNS[4])
    other = serial(visits(SHARD, CONSERVATIVE), DESIGNS[4])
    assert found.compute_s == pytest.approx(other.compute_s)
    assert found.local_s == pytest.approx(other.local_s)
    assert found.network_s == pytest.approx(other.network_s)


def test_compute_is_four_forwards_of_layers_and_three_of_the_head() -> None:
    tokens = SHARD.batch.tokens * 16
    flops = 8 * SHARD.model.base_parameters + 16 * 2048 * 8192 * 30 + 6 * 8192 * 51200
    found = serial(visits(SHARD, AGGRESSIVE), DESIGNS[1])
    assert found.compute_s == pytest.approx(flops * tokens / 256 / 2048e12)


@pytest.mark.parametrize("number", DESIGNS)
def test_remote_time_is_inverse_to_the_share_of_the_link(number: int) -> None:
    design = DESIGNS[number]
    steps = visits(SHARD, AGGRESSIVE)
    base = serial(steps, design)
    link = design.remote
    assert base.remote_s == pytest.approx(moved_bytes(steps) * link.sharers / link.bytes_per_s)
    faster = replace(design, remote=replace(link, bytes_per_s=2 * link.bytes_per_s))
    crowded = replace(design, remote=replace(link, sharers=3 * link.sharers))
    assert serial(steps, faster).remote_s == pytest.approx(base.remote_s / 2)
    assert serial(steps, crowded).remote_s == pytest.approx(base.remote_s * 3)
    assert serial(steps, faster).busy_s == base.busy_s


@pytest.mark.parametrize("number", DESIGNS)
def test_behind_infinite_links_strategies_do_not_differ(number: int) -> None:
    design = replace(DESIGNS[number], remote=SharedLink(math.inf))
    for time in (serial, ahead):
        first, second = (time(visits(SHARD, p), design) for p in STRATEGIES)
        assert first.remote_s == second.remote_s == 0
        assert second.total_s / first.total_s == pytest.approx(1)
    alone = replace(design, network=SharedLink(math.inf), local_bytes_per_s=math.inf)
    left = serial(visits(SHARD, AGGRESSIVE), alone)
    assert left.network_s == left.local_s == 0
    assert left.total_s == left.compute_s


def test_a_twice_as_large_batch_moves_its_weights_no_more() -> None:
    twice = replace(SHARD, batch=Batch(4, 2048))
    weights = 3 * 2 * sum(layer.parameters for layer in SHARD.layers)
    small, large = (moved_bytes(visits(shard, AGGRESSIVE)) for shard in (SHARD, twice))
    assert large - weights == pytest.approx(2 * (small - weights))
    near, far = (serial(visits(s, CONSERVATIVE), DESIGNS[1]).remote_s for s in (SHARD, twice))
    assert far == pytest.approx(2 * near)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    rate=st.floats(1e9, 1e14),
    order=st.sampled_from(Order),
    placement=st.sampled_from(STRATEGIES),
    update=st.sampled_from(Update),
)
def test_moving_ahead_is_never_slower_than_serially_nor_faster_than_each_side(
    rate: float, order: Order, placement: Placement, update: Update
) -> None:
    small = MoeShard(
        MoeTransformer(layers=4, hidden=1024, heads=16, experts=8),
        Division(4, 4, 8, 2),
        Batch(2, 512),
    )
    device = replace(DESIGNS[2], remote=SharedLink(rate))
    steps = visits(small, placement, order, update)
    whole, found = serial(steps, device), ahead(steps, device)
    least = moved_bytes(steps, ahead=True)
    assert found.total_s <= whole.total_s * (1 + 1e-9)
    assert found.total_s >= max(whole.busy_s, least / rate) * (1 - 1e-9)


def test_hiding_a_share() -> None:
    whole = Segments(6, 2, 9, 2)
    assert partly_hidden(whole, 0) == whole
    assert partly_hidden(whole, 0.5).remote_s == 4
    assert partly_hidden(whole, 1).total_s == 10


@pytest.mark.parametrize("placement", STRATEGIES)
def test_bytes_of_the_update(placement: Placement) -> None:
    plain = moved_bytes(visits(SHARD, placement))
    owned = sum(SHARD.state_bytes(layer) for layer in SHARD.layers) / 16
    held = sum(layer.parameters for layer in SHARD.layers)
    far = placement is AGGRESSIVE
    expected = {
        Update.NONE: 0,
        Update.GRADIENTS: 4 * owned,
        Update.BESIDE_MEMORY: 4 * owned + (0 if far else 2 * owned),
        Update.ON_DEVICE: (16 + 12) * owned + (2 * held if far else 0),
    }
    for update, more in expected.items():
        assert moved_bytes(visits(SHARD, placement, update=update)) - plain == pytest.approx(more)


def test_a_pool_gives_a_device_its_port_or_its_part() -> None:
    assert pooled(2).remote.share == pooled(4).remote.share == 512e9
    assert pooled(16).remote.share == 128e9


def test_turns_at_a_pool_hide_the_others_until_it_is_full() -> None:
    whole = Segments(10, 0, 99, 0)
    # Alone 20 / 5 = 4 s; two make 40 / 8 = 5 s for the pool, less than the step.
    assert in_turns(whole, 20, SharedLink(8, 2, 5)).total_s == 14
    # Eight make 160 / 8 = 20 s: the pool is never idle.
    assert in_turns(whole, 20, SharedLink(8, 8, 5)).total_s == 20
