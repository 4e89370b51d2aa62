"""Data-parallel steps: buckets, sums beside backward, and ranks that take different paths."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

import pytest
import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments import zoo
from dynoffload.profiler.recorder import Recorder
from dynoffload.profiler.trace import Trace
from dynoffload.simulation import Link, Machine, Network, network_of, recorded
from dynoffload.simulation.cluster import Cluster
from dynoffload.simulation.own_work import Division
from dynoffload.simulation.recorded import Parameter, Recorded
from dynoffload.simulation.replicas import RankStep, buckets, replicated
from dynoffload.simulation.streams import Slowdown
from dynoffload.simulation.training import Training
from dynoffload.units import KiB, MiB

GB = 1e9
NETWORK = Network(
    (
        Parameter("a", 10 * MiB),
        Parameter("b", 10 * MiB),
        Parameter("frozen", 10 * MiB, trained=False),
        Parameter("c", 20 * MiB),
        Parameter("d", MiB),
        Parameter("e", MiB // 2),
    ),
    {},
)


def step(complete: dict[int, float], backward: float = 4.0) -> RankStep:
    return RankStep(2.0, backward, 1.0, tuple(complete.items()))


ALL = {5: 0.5, 4: 1.0, 3: 2.0, 1: 3.0, 0: 4.0}


def test_buckets_close_when_they_are_full() -> None:
    assert buckets(NETWORK, 20 * MiB) == [[5, 4], [3], [1, 0]]
    assert buckets(NETWORK, 25 * MiB) == [[5, 4], [3, 1], [0]]
    assert buckets(NETWORK, 100 * MiB) == [[5, 4], [3, 1, 0]]


def test_sums_run_beside_backward_and_the_last_is_waited_for() -> None:
    # Sums of 2 * 1/2 of 1.5, 20 and 20 MiB take 0.15, 2 and 2 s.
    cluster = Cluster.flat(2, 10 * MiB)
    found = replicated([[step(ALL)] * 2], NETWORK, cluster, most=20 * MiB)
    assert found.alone_s == ((7.0, 7.0),)
    assert found.link_s[0] == pytest.approx(4.15)
    assert found.seconds[0] == pytest.approx(2 + 4 + 2 + 1)  # the last waits for a's gradient
    slow = replicated([[step(ALL)] * 2], NETWORK, Cluster.flat(2, MiB), most=20 * MiB)
    assert slow.seconds[0] == pytest.approx(2 + 1 + 1.5 + 20 + 20 + 1)  # one after the other
    fast = replicated([[step(ALL)] * 2] * 3, NETWORK, Cluster.flat(2, 1e18), most=20 * MiB)
    assert fast.total_s == pytest.approx(fast.slowest_s) == 21.0


def test_every_sum_waits_for_the_slowest_rank() -> None:
    cluster = Cluster.flat(2, 1e18)
    early = step(dict.fromkeys(ALL, 0.1), 4.0)
    late = step(ALL, 6.0)
    found = replicated([[early, late], [late, early]], NETWORK, cluster, most=20 * MiB)
    # The last sum waits for the late rank until 6 s; the early one has ended backward by then and
    # begins the next step, in which it is the late one, at 7 s.
    assert found.seconds == pytest.approx((9.0, 9.0))
    assert found.total_s == pytest.approx(16.0)
    assert found.slowest_s == 18.0
    slower = Cluster.flat(2, 10 * MiB)
    waits = replicated([[step(ALL), step(ALL, 6.0)]], NETWORK, slower, most=20 * MiB)
    assert waits.seconds[0] == pytest.approx(2 + 6 + 1)


def test_a_parameter_that_no_sample_of_a_rank_uses_holds_nobody_up() -> None:
    cluster = Cluster.flat(2, 1e18)
    skips = step({0: 1.0, 1: 1.0}, 1.0)  # c, d and e are not on its path
    assert replicated([[skips, skips]], NETWORK, cluster).seconds[0] == pytest.approx(4.0)
    both = replicated([[skips, step(ALL)]], NETWORK, cluster)
    assert both.seconds[0] == pytest.approx(7.0)


def test_sums_slow_backward_down() -> None:
    cluster = Cluster.flat(2, 10 * MiB)
    plain = replicated([[step(ALL)] * 2], NETWORK, cluster)
    slowed = replicated(
        [[step(ALL)] * 2], NETWORK, cluster, slowdown=Slowdown(compute_beside_link=1.5)
    )
    assert slowed.seconds[0] > plain.seconds[0]


def test_a_rank_too_few_is_refused() -> None:
    with pytest.raises(ConfigError, match="step 0 has 1 ranks and the cluster 2"):
        replicated([[step(ALL)]], NETWORK, Cluster.flat(2, GB))


@cache
def trees() -> tuple[Network, list[Recorded]]:
    """Return steps of a network whose path is its sample's: trees of different shapes."""
    torch.manual_seed(0)
    model = zoo.build("tree", "tiny-untied", hidden=64, cells=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append):
        for sample in itertools.islice(zoo.samples("tree", max_nodes=24), 6):
            model(sample.args[0]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    network = network_of(model)
    return network, [recorded(trace, network) for trace in traces]


def test_recorded_steps_of_different_samples() -> None:
    network, steps = trees()
    made = [RankStep.plain(one) for one in steps]
    for one, step_made in zip(steps, made, strict=True):
        assert step_made.alone_s == pytest.approx(sum(one.seconds))
        assert {number for number, _ in step_made.complete} == one.completed
        assert max(when for _, when in step_made.complete) <= step_made.backward_s * (1 + 1e-9)
    assert len({frozenset(one.completed) for one in steps}) > 1, "ranks must take different paths"
    pairs = [made[0:2], made[2:4], made[4:6]]
    free = replicated(pairs, network, Cluster.flat(2, 1e18))
    assert max(sum(pair[rank].alone_s for pair in pairs) for rank in (0, 1)) <= free.total_s
    # At any moment some rank computes; that ranks wait in turn is more than the slowest of each.
    assert free.total_s <= sum(one.alone_s for one in made) * (1 + 1e-9)
    slow = replicated(pairs, network, Cluster.flat(2, 1e6))
    nbytes = sum(one.nbytes for one in network.parameters)
    assert slow.link_s == pytest.approx([nbytes / 1e6] * 3)
    assert slow.total_s > free.total_s
    # One rank has no others, and nothing to sum.
    alone = replicated([[one] for one in made], network, Cluster.flat(1, 1.0))
    assert alone.total_s == pytest.approx(sum(one.alone_s for one in made))


def test_recorded_steps_under_a_budget() -> None:
    network, steps = trees()
    whole = sum(one.nbytes for one in network.parameters)
    division = Division(
        pool_bytes=2 * whole,
        page_bytes=4 * KiB,
        reserve_bytes=whole // 4,
        chunk_bytes=64 * KiB,
        min_paged_bytes=4 * KiB,
        min_moved_bytes=4 * KiB,
        kept_bytes=MiB,
    )
    machine = Machine(Link(5e7, 5e7, 7e7), fast_bytes=1)
    ranks = [Training(network, division, machine, prefetch=True) for _ in range(2)]
    pairs = [
        [RankStep.budgeted(rank, steps[2 * n + place]) for place, rank in enumerate(ranks)]
        for n in range(3)
    ]
    for pair, number in zip(pairs, range(0, 6, 2), strict=True):
        for one, plain in zip(pair, steps[number : number + 2], strict=True):
            assert {parameter for parameter, _ in one.complete} == plain.completed
            assert one.complete[-1][1] <= one.backward_s + 1e-9
            # Updates wait for the next forward.
            assert one.alone_s >= sum(plain.seconds[:2]) * (1 - 1e-9)

    def passes(steps_made: Iterable[RankStep]) -> float:
        return sum(one.forward_s + one.backward_s for one in steps_made)

    assert passes(one for pair in pairs for one in pair) > passes(map(RankStep.plain, steps))
    found = replicated(pairs, network, Cluster.flat(2, 1e8))
    assert found.total_s > max(sum(pair[rank].alone_s for pair in pairs) for rank in (0, 1))
