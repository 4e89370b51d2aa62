"""Expert layers in parts: published volumes, closed forms, shared buffers, memory and speeds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynoffload.errors import ConfigError
from dynoffload.planning.strategies import Strategy
from dynoffload.simulation.cluster import Cluster, Wire
from dynoffload.simulation.hardware import Accelerator, SharedLink
from dynoffload.simulation.pipeline import (
    Cost,
    Layer,
    Part,
    backward,
    costs,
    elements,
    forward,
    part_of,
    volumes,
)
from dynoffload.simulation.roofline import Matmul, work
from dynoffload.simulation.routing import Routing, Spread
from dynoffload.simulation.speeds import Speeds, Table
from dynoffload.simulation.streams import Program, Resource, Slowdown

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


def seconds(program: Program) -> float:
    return program.run().seconds


@pytest.mark.parametrize("strategy", Strategy)
def test_tasks_have_the_published_volumes(strategy: Strategy) -> None:
    for make, pass_, published in zip(
        (forward, backward), (False, True), PUBLISHED[strategy], strict=True
    ):
        counted = volumes(strategy, backward=pass_)
        assert (counted.products, counted.exchanges, counted.copies) == published
        timeline = make(part(1.0, 10.0, 100.0), 3, strategy).run()
        busy = [float(timeline.busy(resource)[0]) for resource in Resource]
        assert busy == pytest.approx(
            [3 * n * unit for n, unit in zip(published, (1, 10, 100), strict=True)]
        )


def test_one_part_takes_the_sum() -> None:
    assert seconds(forward(part(3.0, 5.0, 0.0), 1)) == 2 * 3 + 2 * 5
    assert seconds(backward(part(3.0, 5.0, 0.0), 1)) == 4 * 3 + 2 * 5
    # The product that is made once more runs beside the exchange of the gradient.
    assert seconds(backward(part(3.0, 5.0, 0.0), 1, Strategy.S4)) == 4 * 3 + 3 * 5
    # Of two copies the first runs beside the products, the second beside the last product and R.
    assert seconds(forward(part(3.0, 5.0, 0.0), 1, Strategy.S1)) == 2 * 3 + 2 * 5


@pytest.mark.parametrize(("product", "exchange"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)])
def test_a_pipeline_takes_the_longer_and_its_fill_and_drain(
    product: float, exchange: float
) -> None:
    for parts in (2, 4, 8, 64, 512):
        one = part(product / parts, exchange / parts, 0.0)
        found = seconds(forward(one, parts))
        longer = max(2 * product, 2 * exchange)
        if product >= exchange:
            assert found == pytest.approx(longer + 2 * exchange / parts)
        else:  # the last part's products are waited for
            assert longer <= found <= longer + 2 * product / parts * (1 + 1e-9)
        assert seconds(backward(one, parts)) >= max(4 * product, 2 * exchange)
    assert found == pytest.approx(longer, rel=5e-3)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("units", [(1, 1, 0.1), (1, 3, 0.1), (3, 1, 0.1), (1, 1, 2), (2, 1, 0.4)])
def test_no_schedule_beats_the_bound_or_loses_to_the_sum(
    strategy: Strategy, units: tuple[float, float, float]
) -> None:
    for parts in (1, 2, 5, 8):
        for make in (forward, backward):
            cost = Cost.of(make(part(*units), parts, strategy).run())
            assert cost.bound <= cost.seconds * (1 + 1e-12)
            assert cost.seconds <= cost.compute_s + cost.link_s + cost.copy_s


def test_shared_buffers_wait() -> None:
    # The middle's one buffer is free only when its copy out has ended: copies set the pace.
    slow = part(1.0, 1.0, 1.0)
    timeline = forward(slow, 4, Strategy.S2).run()
    named = {task.name: number for number, task in enumerate(timeline.tasks)}
    for k in range(1, 4):
        gone = timeline.ends[named[f"middle {k - 1} out"], 0]
        assert timeline.starts[named[f"first {k}"], 0] >= gone
    assert timeline.seconds > seconds(forward(slow, 4))
    # A third input takes the first one's buffer.
    timeline = forward(part(1.0, 1.0, 20.0), 4, Strategy.S3).run()
    named = {task.name: number for number, task in enumerate(timeline.tasks)}
    assert timeline.starts[named["S2"], 0] == timeline.ends[named["input 0 out"], 0] == 21.0


def test_the_slowest_rank_decides_at_every_exchange() -> None:
    uneven = replace(part(1.0, 1.0, 0.0, ranks=2), product=np.array([1.0, 3.0]))
    assert seconds(forward(uneven, 4)) == seconds(forward(part(3.0, 1.0, 0.0), 4))
    # Ranks that are slow in turn, one at each exchange, cost more than each alone.
    program = Program(2)
    last: list[int] = []
    for k in range(4):
        compute = program.add("products", Resource.COMPUTE, [1 + k % 2, 2 - k % 2], last)
        last = [program.add("exchange", Resource.LINK, 0.0, [compute])]
    assert program.run().seconds == 8.0 > program.run().busy(Resource.COMPUTE).max()


def test_a_slowed_pipeline_lies_between() -> None:
    one = part(1.0, 1.0, 0.0)
    slowed = forward(one, 8).run(Slowdown(compute_beside_link=1.3, link_beside_compute=1.3))
    assert seconds(forward(one, 8)) < slowed.seconds <= 1.3 * seconds(forward(one, 8))


DEVICE = Accelerator("one", 100e12, 1e12, SharedLink(20e9), SharedLink(50e9))


def test_seconds_of_a_part_follow_from_rows() -> None:
    layer, spread = Layer(1024, 4096), Spread(4, 4)
    speeds = Speeds(Table.rate(1e12), Table.rate(50e9, 1e-5), Table.rate(20e9))
    routing = Routing.of_counts(np.array([4000.0, 0.0, 2000.0, 2000.0]), 4)
    found = part_of(layer, routing, spread, speeds)
    assert found.product == pytest.approx(np.array([4000, 0, 2000, 2000]) * 1024 * 4096 / 1e12)
    assert found.copy_input == pytest.approx(np.array([4000, 0, 2000, 2000]) * 2048 / 20e9)
    assert found.copy_middle == pytest.approx(4 * found.copy_input)
    # Rank 0 gets 1000 rows of each rank; a rank sends 2000.
    assert found.dispatch == pytest.approx(1e-5 + 4000 * 2048 / 50e9)
    cluster = Cluster(4, 2, Wire(100e9), Wire(25e9))
    nodes = part_of(layer, routing, spread, speeds, cluster)
    assert nodes.dispatch == pytest.approx(2000 * 2048 / 25e9)  # half of what a node gets
    first, second = costs(layer, routing, spread, speeds, 1)
    assert first.seconds == pytest.approx(2 * found.product[0] + 2 * found.dispatch)
    assert second.seconds == pytest.approx(4 * found.product[0] + 2 * found.dispatch)
    assert first.even_s == pytest.approx(first.compute_s / 2)


@pytest.mark.parametrize("rows", [1.0, 64.0, 150.0, 1024.0, 65536.0])
def test_the_roofline_of_products(rows: float) -> None:
    speeds = Speeds.of(DEVICE, 1024, 4096, 3, 2)
    product = Matmul("product", rows / 3, 1024, 4096, 3).forward(2)
    exact = work([product], DEVICE)
    assert speeds.gemm(rows * 1024 * 4096) == pytest.approx(
        exact.compute_s + exact.local_s, rel=2e-2
    )
    if rows != 150.0:  # near the ridge a line stands for a corner
        assert speeds.gemm(rows * 1024 * 4096) == pytest.approx(exact.compute_s + exact.local_s)


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


def test_tables() -> None:
    table = Table(((10.0, 1.0), (20.0, 3.0), (40.0, 4.0)))
    assert [table(v) for v in (0, 1, 10, 15, 20, 30, 60)] == [0, 1, 1, 2, 3, 3.5, 5]
    assert Table(((10.0, 2.0),))(5) == 2
    assert Table(((10.0, 2.0),))(20) == 4


def test_speeds_are_the_same_after_a_file(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    speeds = replace(Speeds.of(DEVICE, 64, 256, 1, 2), slowdown=Slowdown(link_beside_copy=1.25))
    speeds.save(path)
    assert Speeds.load(path) == speeds


def test_what_a_layer_has_fitted_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fitted.json"
    points = [[1e3, 1e-4], [1e6, 2e-2]]
    fitted: dict[str, object] = {
        name: {"points": points} for name in ("compute", "communication", "copy")
    }
    factors = {"compute_beside": 1.3, "communication_beside": 1.2, "copy_beside": 1.0}
    path.write_text(json.dumps({**fitted, **factors}))
    table = Table(((1e3, 1e-4), (1e6, 2e-2)))
    slowed = Slowdown(compute_beside_link=1.3, link_beside_compute=1.2)
    assert Speeds.load(path) == Speeds(table, table, table, slowed)
    path.write_text(json.dumps({**fitted, "beside": 2}))
    with pytest.raises(ConfigError, match="'beside' is no part of a cost model"):
        Speeds.load(path)
    del fitted["copy"]
    path.write_text(json.dumps(fitted))
    with pytest.raises(ConfigError, match="copy is None: give"):
        Speeds.load(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gemm": []}, "gemm: a table of speeds needs"),
        ({"gemm": [[2, 1], [1, 1]]}, "gemm: volumes .* must ascend"),
        ({"copy": "fast"}, "copy is 'fast'"),
        ({"copy": [[0, -1]]}, "copy: .* no volume"),
        ({"copies": [[0, 1]]}, "'copies' is no part of speeds"),
        ({"slowdown": {"compute": 2}}, "'compute' is no part of slowdown"),
        ({"slowdown": {"copy_beside_link": 0.5}}, "copy_beside_link is 0.5"),
        ({"slowdown": {"copy_beside_link": "much"}}, "is no number"),
        ({"exchange": None}, "exchange is None"),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({**Speeds.of(DEVICE, 64, 256, 1, 2).document(), **change}))
    with pytest.raises(ConfigError, match=f"speeds.json.*{says}"):
        Speeds.load(path)
    with pytest.raises(ConfigError, match="cannot read speeds"):
        Speeds.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="lack exchange and copy"):
        Speeds.read({"gemm": [[0, 1]]})
