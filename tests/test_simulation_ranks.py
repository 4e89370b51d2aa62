"""A divided network on devices and ranks: published volumes, bounds that hold, the closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.errors import ConfigError
from dynoffload.moe.parallel.strategies import Strategy
from dynoffload.simulation.designs import DESIGNS, STRATEGIES, Placement
from dynoffload.simulation.moe_cluster import Batch, Division, MoeShard, MoeTransformer
from dynoffload.simulation.moe_steps import Cost, MoeSteps, Part, backward, forward
from dynoffload.simulation.movement import Order, Update, ahead, moved_bytes, serial, visits
from dynoffload.simulation.ranks import Cluster, Resource, Routing, Wire
from dynoffload.simulation.roofline import Accelerator, SharedLink, work

GB = 1e9
NODES = Cluster(8, 4, Wire(100 * GB, 1e-6), Wire(40 * GB, 5e-6))
PUBLISHED = {
    Strategy.NONE: ((2, 2, 0), (4, 2, 0)),
    Strategy.S1: ((2, 2, 5), (4, 2, 5)),
    Strategy.S2: ((2, 2, 4), (4, 3, 4)),
    Strategy.S3: ((2, 2, 1), (5, 2, 1)),
    Strategy.S4: ((2, 2, 0), (5, 3, 0)),
}
SHARD = MoeShard(
    MoeTransformer(layers=30, hidden=8192, heads=64, experts=128, vocabulary=51200),
    Division(tensor=16, data=16, expert=128, slices=2),
    Batch(sequences=32, length=2048),
)


def part(product: float, exchange: float, copy: float, ranks: int = 1) -> Part:
    """Return a part whose units take so long; the inner width is four times the width."""
    each = np.ones(ranks)
    return Part(
        product * each, exchange, exchange, copy * each, 4 * copy * each, 0 * each, 0 * each
    )


def even(shard: MoeShard) -> Routing:
    cut = shard.division
    rows = shard.batch.tokens / cut.tensor
    return Routing.even(cut.devices, shard.model.experts, rows, cut.expert, cut.slices)


def test_nodes_share_their_wire_and_the_busiest_decides() -> None:
    # Each of 4 ranks sends 1 GB to each of 4 ranks of the other node; 3 stay inside.
    assert NODES.all_to_all(np.full((8, 8), GB)) == pytest.approx(5e-6 + 16 / 40)
    assert NODES.all_to_all(np.diag(np.full(8, GB))) == 0
    into = np.zeros((8, 8))
    into[0, 1:4], into[1, 2] = 2 * GB, 5 * GB  # 7 into rank 2
    assert NODES.all_to_all(into) == NODES.all_to_all(into.T) == pytest.approx(1e-6 + 7 / 100)
    # One ring crosses each node's wire once; four at the same time share it.
    assert NODES.all_gather(8 * GB, NODES.rings(8)) == pytest.approx(7 * (5e-6 + 1 / 40))
    assert NODES.all_gather(2 * GB, NODES.rings(2, 4)) == pytest.approx(5e-6 + 4 / 40)
    with pytest.raises(ConfigError, match="nodes of 3"):
        Cluster(8, 3, Wire(1), Wire(1))
    with pytest.raises(ConfigError, match="above 0"):
        Wire(0)
    with pytest.raises(ConfigError, match="no rings of 3"):
        NODES.rings(3)


def test_rows_reach_all_slices_of_their_expert_within_the_replica() -> None:
    rows = np.zeros((8, 4))
    rows[1, 3] = 5  # the second group, on ranks 2 and 3 of the first replica
    rows[6, 0] = 7  # the first group, on ranks 4 and 5 of the second
    sent = Routing(rows, groups=2, slices=2).sent()
    assert sent[1].tolist() == [0, 0, 5, 5, 0, 0, 0, 0]
    assert sent[6].tolist() == [0, 0, 0, 0, 7, 7, 0, 0]
    drawn = Routing.even(8, 4, 1000, 4).skewed(1.0, np.random.default_rng(0))
    assert drawn.rows.sum(axis=1).tolist() == [1000.0] * 8
    assert drawn.sent().sum(axis=0).max() > 1.5 * 1000


@pytest.mark.parametrize("strategy", Strategy)
def test_tasks_have_the_published_volumes_and_keep_the_bounds(strategy: Strategy) -> None:
    for make, published in zip((forward, backward), PUBLISHED[strategy], strict=True):
        busy = make(part(1.0, 10.0, 100.0), 3, strategy).busy
        found = [float(busy[resource][0]) for resource in Resource]
        assert found == pytest.approx(
            [3 * n * unit for n, unit in zip(published, (1, 10, 100), strict=True)]
        )
        for units in ((1, 1, 0.1), (1, 3, 0.1), (3, 1, 0.1), (1, 1, 2), (2, 1, 0.4)):
            for parts in (1, 2, 5, 8):
                cost = Cost.of(make(part(*units), parts, strategy))
                assert cost.bound <= cost.seconds * (1 + 1e-12)
                assert cost.seconds <= cost.compute_s + cost.link_s + cost.copy_s


def test_a_pipeline_comes_near_the_longer_and_buffers_and_slow_ranks_hold_it_back() -> None:
    for product, exchange in ((2.0, 1.0), (1.0, 2.0), (1.0, 1.0)):
        one = part(product / 512, exchange / 512, 0.0)
        assert forward(one, 512).seconds == pytest.approx(2 * max(product, exchange), rel=5e-3)
    slow = part(1.0, 1.0, 1.0)  # the middle's one buffer is free when its copy out has ended
    assert forward(slow, 4, Strategy.S2).seconds > forward(slow, 4).seconds
    uneven = replace(part(1.0, 1.0, 0.0, ranks=2), product=np.array([1.0, 3.0]))
    assert forward(uneven, 4).seconds == forward(part(3.0, 1.0, 0.0), 4).seconds


@pytest.mark.parametrize(
    "division", [Division(16, 16, 128, 2), Division(32, 8, 128, 1), Division(8, 32, 64, 4)]
)
def test_even_and_in_one_part_a_step_is_the_closed_form(division: Division) -> None:
    shard, device = replace(SHARD, division=division), DESIGNS[4]
    flat = Cluster.flat(256, device.network.share)
    found = MoeSteps(shard, device, flat).step([even(shard)])
    near = Placement("local", weights=False, checkpoints=False, activations=False)
    formula = serial(visits(shard, near, Order.BESIDE), device)
    # The formula recomputes experts too, and exchanges their rows once more.
    moe, around = shard.layers[1], (shard.attention, shard.around_experts)
    every, others = (
        work(operators, device)
        for operators in (moe.forward, [one for block in around for one in block.forward])
    )
    experts = every.compute_s + every.local_s - others.compute_s - others.local_s
    exchange = device.network.seconds(moe.forward_network - shard.attention.forward_network)
    again = shard.model.moe_layers * (experts + exchange)
    # It also lets a row stay at home in both slices of an expert, which are two ranks.
    exact = 1e-9 if division.slices == 1 else 1e-3
    assert found.seconds == pytest.approx(formula.busy_s - again, rel=exact)


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


def test_the_network_has_its_published_size_and_each_copy_is_held_once() -> None:
    model = SHARD.model
    assert model.parameters == pytest.approx(1047e9, rel=0.001)
    for division in (SHARD.division, Division(8, 32, 64, 4), Division(32, 8, 128, 1)):
        shard = replace(SHARD, division=division)
        dense = sum(layer.dense for layer in shard.layers) * division.tensor
        expert = sum(layer.expert for layer in shard.layers) * division.devices
        assert dense + expert / division.replicas == model.parameters


def test_what_cannot_be_is_refused() -> None:
    for division, message in (
        (Division(24, 16, 128, 1), "64 heads cannot be divided into 24"),
        (Division(16, 16, 96, 1), "128 experts cannot be divided into 96"),
        (Division(16, 16, 128, 4), "256 devices cannot be divided into 512"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(SHARD, division=division)
    with pytest.raises(ConfigError, match="link must be above 0"):
        SharedLink(1, sharers=0)
    with pytest.raises(ConfigError, match="'slow' must be above 0"):
        Accelerator("slow", 0, 1, SharedLink(1), SharedLink(1))
