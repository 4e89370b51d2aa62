"""Steps of a divided transformer on a cluster: equal to the closed form where that holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynoffload.planning.strategies import Strategy
from dynoffload.simulation.cluster import Cluster, Wire
from dynoffload.simulation.designs import DESIGNS, Placement
from dynoffload.simulation.moe_cluster import Batch, Division, MoeShard, MoeTransformer
from dynoffload.simulation.moe_steps import MoeSteps
from dynoffload.simulation.movement import Order, serial, visits
from dynoffload.simulation.roofline import work
from dynoffload.simulation.routing import Routing

SHARD = MoeShard(
    MoeTransformer(layers=30, hidden=8192, heads=64, experts=128, vocabulary=51200),
    Division(tensor=16, data=16, expert=128, slices=2),
    Batch(sequences=32, length=2048),
)
ALL_LOCAL = Placement("local", weights=False, checkpoints=False, activations=False)


def even(shard: MoeShard) -> Routing:
    cut = shard.division
    return Routing.even(cut.devices, shard.model.experts, shard.batch.tokens / cut.tensor)


@pytest.mark.parametrize(
    "division", [Division(16, 16, 128, 2), Division(32, 8, 128, 1), Division(8, 32, 64, 4)]
)
def test_even_and_in_one_part_it_is_the_closed_form(division: Division) -> None:
    shard = replace(SHARD, division=division)
    device = DESIGNS[4]
    flat = Cluster.flat(256, device.network.share)
    found = MoeSteps(shard, device, flat).step([even(shard)])
    formula = serial(visits(shard, ALL_LOCAL, Order.BESIDE), device)
    # The formula recomputes experts too, and exchanges their rows once more.
    moe = shard.layers[1]
    experts = work(moe.forward, device).compute_s + work(moe.forward, device).local_s
    around = shard.attention, shard.around_experts
    for block in around:
        done = work(block.forward, device)
        experts -= done.compute_s + done.local_s
    exchange = moe.forward_network - shard.attention.forward_network
    again = shard.model.moe_layers * (experts + device.network.seconds(exchange))
    # It also lets a row stay at home in both slices of an expert, which are two ranks.
    exact = 1e-9 if division.slices == 1 else 1e-3
    assert found.seconds == pytest.approx(formula.busy_s - again, rel=exact)
    assert found.link_s == pytest.approx(
        formula.network_s - shard.model.moe_layers * device.network.seconds(exchange),
        rel=10 * exact,
    )


def test_uneven_experts_and_shared_wires_cost_time() -> None:
    device = DESIGNS[4]
    flat = Cluster.flat(256, 900e9)
    nodes = Cluster(256, 4, Wire(900e9), Wire(200e9))
    drawn = Routing.drawn(256, 128, 4096, 0.5, np.random.default_rng(1))
    plain = MoeSteps(SHARD, device, flat)
    first = plain.step([even(SHARD)])
    skewed = plain.step([drawn])
    assert skewed.even_s == first.even_s
    most = drawn.received(plain.spread).max() / drawn.received(plain.spread).mean()
    assert skewed.experts.compute_s == pytest.approx(most * first.experts.compute_s, rel=0.02)
    assert skewed.experts.even_s == pytest.approx(first.experts.even_s, rel=0.05)
    slow = MoeSteps(SHARD, device, nodes).step([even(SHARD)])
    assert slow.experts.compute_s == first.experts.compute_s
    assert slow.link_s > 3 * first.link_s
    halves = MoeSteps(SHARD, device, nodes).step([even(SHARD)], 2)
    assert halves.seconds < slow.seconds
    assert halves.link_s == pytest.approx(slow.link_s)


def test_a_routing_for_each_layer_is_their_sum() -> None:
    steps = MoeSteps(SHARD, DESIGNS[4], Cluster.flat(256, 900e9))
    one = steps.step([even(SHARD)], 4, Strategy.S3)
    each = steps.step([even(SHARD)] * SHARD.model.moe_layers, 4, Strategy.S3)
    assert each.seconds == pytest.approx(one.seconds)
    kept = steps.kept([even(SHARD)], 4, Strategy.S3)
    plain = steps.kept([even(SHARD)], 4, Strategy.NONE)
    rows, width, inner = 65536 * 16 / 128, 8192, 16384
    saved = rows * (2 * width * 2 / 4 + inner * 3 / 4)
    assert plain.activations - kept.activations == pytest.approx(15 * saved)
    assert plain.buffers == pytest.approx(rows * (width + inner))
