"""Collectives and routing, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from dynoffload.errors import ConfigError
from dynoffload.simulation.cluster import Cluster, Wire
from dynoffload.simulation.routing import Routing, Spread

GB = 1e9
NODES = Cluster(8, 4, Wire(100 * GB, 1e-6), Wire(40 * GB, 5e-6))


def even(ranks: int, each: float) -> np.ndarray:
    return np.full((ranks, ranks), each)


def test_an_even_all_to_all_takes_its_bytes_at_the_wires_rate() -> None:
    flat = Cluster.flat(16, 50 * GB)
    assert flat.all_to_all(even(16, GB)) == pytest.approx(15 / 50)
    assert flat.all_to_all(np.diag(np.full(16, GB))) == 0  # nothing leaves


def test_nodes_share_their_wire() -> None:
    # Each of 4 ranks sends 1 GB to each of 4 ranks of the other node; 3 stay inside.
    assert NODES.all_to_all(even(8, GB)) == pytest.approx(5e-6 + 16 / 40)
    near = np.kron(np.eye(2), np.ones((4, 4))) * GB
    assert NODES.all_to_all(near) == pytest.approx(1e-6 + 3 / 100)


def test_the_busiest_way_in_or_out_decides() -> None:
    sent = np.zeros((8, 8))
    sent[0, 1:4] = 2 * GB  # out of rank 0
    sent[1, 2] = 5 * GB  # 7 into rank 2
    assert NODES.all_to_all(sent) == pytest.approx(1e-6 + 7 / 100)
    assert NODES.all_to_all(sent.T) == pytest.approx(1e-6 + 7 / 100)


def test_rings() -> None:
    flat = Cluster.flat(16, 50 * GB, 1e-6)
    assert flat.all_gather(16 * GB, flat.rings(16)) == pytest.approx(15 * (1e-6 + 1 / 50))
    # One ring crosses each node's wire once; four at the same time share it.
    assert NODES.all_gather(8 * GB, NODES.rings(8)) == pytest.approx(7 * (5e-6 + 1 / 40))
    pairs = NODES.rings(2, 4)
    assert pairs[1] == range(1, 8, 4)
    assert NODES.all_gather(2 * GB, pairs) == pytest.approx(5e-6 + 4 / 40)
    assert NODES.all_gather(4 * GB, NODES.rings(4)) == pytest.approx(3 * (1e-6 + 1 / 100))
    assert NODES.all_gather(GB, NODES.rings(1)) == 0


def test_clusters_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="nodes of 3"):
        Cluster(8, 3, Wire(1), Wire(1))
    with pytest.raises(ConfigError, match="above 0"):
        Wire(0)
    with pytest.raises(ConfigError, match="shape"):
        NODES.all_to_all(np.zeros((4, 4)))
    with pytest.raises(ConfigError, match="no rings of 3"):
        NODES.rings(3)


def test_rows_reach_all_slices_of_their_expert_within_the_replica() -> None:
    spread = Spread(8, groups=2, slices=2)
    rows = np.zeros((8, 4))
    rows[1, 3] = 5  # the second group, on ranks 2 and 3 of the first replica
    rows[6, 0] = 7  # the first group, on ranks 4 and 5 of the second
    routing = Routing(rows)
    assert routing.received(spread).tolist() == [0, 0, 5, 5, 7, 7, 0, 0]
    sent = routing.sent(spread, 10)
    assert sent[1].tolist() == [0, 0, 50, 50, 0, 0, 0, 0]
    assert sent[6].tolist() == [0, 0, 0, 0, 70, 70, 0, 0]


def test_routings_keep_rows() -> None:
    even, spread = Routing.even(8, 4, 12), Spread(8, 4)
    assert even.received(spread).tolist() == [12.0] * 8
    drawn = Routing.drawn(8, 4, 1000, 1.0, np.random.default_rng(0))
    assert drawn.rows.sum(axis=1).tolist() == [1000.0] * 8
    assert drawn.received(Spread(8, 4)).max() > 1.5 * 1000
    again = Routing.drawn(8, 4, 1000, 1.0, np.random.default_rng(0))
    assert (again.rows == drawn.rows).all()
    assert drawn.part(4).rows.sum() == 2000
