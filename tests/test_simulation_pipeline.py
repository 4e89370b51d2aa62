"""Expert layers in parts: published volumes, closed forms, shared buffers and memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynoffload.planning.strategies import Strategy
from dynoffload.simulation.cluster import Cluster, Wire
from dynoffload.simulation.pipeline import (
    Cost,
    Layer,
    Part,
    backward,
    cost_of,
    elements,
    forward,
    part_of,
)
from dynoffload.simulation.roofline import Accelerator, Matmul, SharedLink, work
from dynoffload.simulation.routing import Routing, Spread
from dynoffload.simulation.streams import Resource, Timeline

PUBLISHED = {
    Strategy.NONE: ((2, 2, 0), (4, 2, 0)),
    Strategy.S1: ((2, 2, 5), (4, 2, 5)),
    Strategy.S2: ((2, 2, 4), (4, 3, 4)),
    Strategy.S3: ((2, 2, 1), (5, 2, 1)),
    Strategy.S4: ((2, 2, 0), (5, 3, 0)),
}


def part(product: float, exchange: float, copy: float, ranks: int = 1) -> Part:
    """Return a part whose units take so long; the inner width is four times the width."""
    each = np.ones(ranks)
    return Part(
        product * each, exchange, exchange, copy * each, 4 * copy * each, 0 * each, 0 * each
    )


@pytest.mark.parametrize("strategy", Strategy)
def test_tasks_have_the_published_volumes(strategy: Strategy) -> None:
    for make, published in zip((forward, backward), PUBLISHED[strategy], strict=True):
        timeline = make(part(1.0, 10.0, 100.0), 3, strategy)
        busy = [float(timeline.busy(resource)[0]) for resource in Resource]
        assert busy == pytest.approx(
            [3 * n * unit for n, unit in zip(published, (1, 10, 100), strict=True)]
        )


def test_one_part_takes_the_sum() -> None:
    assert forward(part(3.0, 5.0, 0.0), 1).seconds == 2 * 3 + 2 * 5
    assert backward(part(3.0, 5.0, 0.0), 1).seconds == 4 * 3 + 2 * 5
    # The product that is made once more runs beside the exchange of the gradient.
    assert backward(part(3.0, 5.0, 0.0), 1, Strategy.S4).seconds == 4 * 3 + 3 * 5
    # Of two copies the first runs beside the products, the second beside the last product and R.
    assert forward(part(3.0, 5.0, 0.0), 1, Strategy.S1).seconds == 2 * 3 + 2 * 5


@pytest.mark.parametrize(("product", "exchange"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)])
def test_a_pipeline_takes_the_longer_and_its_fill_and_drain(
    product: float, exchange: float
) -> None:
    for parts in (2, 4, 8, 64, 512):
        one = part(product / parts, exchange / parts, 0.0)
        found = forward(one, parts).seconds
        longer = max(2 * product, 2 * exchange)
        if product >= exchange:
            assert found == pytest.approx(longer + 2 * exchange / parts)
        else:  # the last part's products are waited for
            assert longer <= found <= longer + 2 * product / parts * (1 + 1e-9)
        assert backward(one, parts).seconds >= max(4 * product, 2 * exchange)
    assert found == pytest.approx(longer, rel=5e-3)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("units", [(1, 1, 0.1), (1, 3, 0.1), (3, 1, 0.1), (1, 1, 2), (2, 1, 0.4)])
def test_no_schedule_beats_the_bound_or_loses_to_the_sum(
    strategy: Strategy, units: tuple[float, float, float]
) -> None:
    for parts in (1, 2, 5, 8):
        for make in (forward, backward):
            cost = Cost.of(make(part(*units), parts, strategy))
            assert cost.bound <= cost.seconds * (1 + 1e-12)
            assert cost.seconds <= cost.compute_s + cost.link_s + cost.copy_s


def test_shared_buffers_wait() -> None:
    # The middle's one buffer is free only when its copy out has ended: copies set the pace.
    slow = part(1.0, 1.0, 1.0)
    timeline = forward(slow, 4, Strategy.S2)
    named = {task.name: task for task in timeline.tasks}
    for k in range(1, 4):
        gone = named[f"middle {k - 1} out"].end[0]
        assert named[f"first {k}"].start[0] >= gone
    assert timeline.seconds > forward(slow, 4).seconds
    # A third input takes the first one's buffer.
    timeline = forward(part(1.0, 1.0, 20.0), 4, Strategy.S3)
    named = {task.name: task for task in timeline.tasks}
    assert named["S2"].start[0] == named["input 0 out"].end[0] == 21.0


def test_the_slowest_rank_decides_at_every_exchange() -> None:
    uneven = replace(part(1.0, 1.0, 0.0, ranks=2), product=np.array([1.0, 3.0]))
    assert forward(uneven, 4).seconds == forward(part(3.0, 1.0, 0.0), 4).seconds
    # Ranks that are slow in turn, one at each exchange, cost more than each alone.
    timeline = Timeline(2)
    last: list[int] = []
    for k in range(4):
        compute = timeline.add("products", Resource.COMPUTE, [1 + k % 2, 2 - k % 2], last)
        last = [timeline.add("exchange", Resource.LINK, 0.0, [compute])]
    assert timeline.seconds == 8.0 > timeline.busy(Resource.COMPUTE).max()


DEVICE = Accelerator("one", 100e12, 1e12, SharedLink(20e9), SharedLink(50e9))


def test_seconds_of_a_part_follow_from_rows() -> None:
    layer, spread = Layer(1024, 4096), Spread(4, 4)
    routing = Routing(np.tile(np.array([1000.0, 0.0, 500.0, 500.0]), (4, 1)))
    found = part_of(layer, routing, spread, DEVICE, Cluster.flat(4, 50e9, 1e-5))
    rows = np.array([4000, 0, 2000, 2000])
    assert found.product == pytest.approx(2 * rows * 1024 * 4096 / 100e12)
    assert found.copy_input == pytest.approx(rows * 2048 / 20e9)
    assert found.copy_middle == pytest.approx(4 * found.copy_input)
    # Rank 0 gets 1000 rows of each of three others.
    assert found.dispatch == pytest.approx(1e-5 + 3000 * 2048 / 50e9)
    nodes = part_of(layer, routing, spread, DEVICE, Cluster(4, 2, Wire(100e9), Wire(25e9)))
    assert nodes.dispatch == pytest.approx(2000 * 2048 / 25e9)  # half of what a node gets
    first, second = (Cost.of(make(found, 1)) for make in (forward, backward))
    assert first.seconds == pytest.approx(2 * found.product[0] + found.dispatch + found.combine)
    assert second.seconds == pytest.approx(4 * found.product[0] + found.dispatch + found.combine)
    assert first.even_s == pytest.approx(first.compute_s / 2)
    assert cost_of(found, 1) == first + second


@pytest.mark.parametrize("rows", [1.0, 64.0, 150.0, 1024.0, 65536.0])
def test_the_roofline_of_products(rows: float) -> None:
    """Of three experts on one rank."""
    product = Matmul("product", rows / 3, 1024, 4096, 3).forward(2)
    exact = work([product], DEVICE)
    found = part_of(
        Layer(1024, 4096), Routing.even(1, 3, rows), Spread(1, 1), DEVICE, Cluster.flat(1, 1.0)
    )
    assert found.product[0] == pytest.approx(exact.compute_s + exact.local_s)


def test_memory_is_the_published_formula() -> None:
    rows, width, inner = 1000.0, 16, 64
    whole = elements(rows, width, inner, 64)
    assert whole.states == 4 * (64 * 16 + 2 * 16 * 64)
    assert whole.activations == rows * (4 * 16 + 64)
    assert whole.buffers == rows * (16 + 64)
    for parts in (2, 4, 8):
        saved = rows * (2 * 16 * (parts - 2) / parts + 64 * (parts - 1) / parts)
        found = elements(rows, width, inner, 64, parts)
        assert whole.activations - found.activations == pytest.approx(saved)
        assert whole.buffers - found.buffers == pytest.approx(saved)
        assert elements(rows, width, inner, 64, parts, shared=False) == whole
    assert elements(rows, width, inner, 64, 64).buffers == 0
