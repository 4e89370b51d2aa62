"""Ranks and the wires between them: how long collectives take.

Collectives last as long as the busiest wire is busy. Packets, switches and congestion in them are
not simulated, and all ranks are taken to begin at once.

[Note: wires]  Every rank has a port to the others of its node, and every node one wire to all other
nodes, which its ranks share; both carry as much in as out at the same time. Traffic inside and
between nodes goes side by side.

[Note: collectives]  An all-to-all lasts as long as the wire through which most bytes go, in or out,
and one latency, as all its messages are on their way at once. Gathers and scattered sums go in
rings: every rank hands a part on to the next, one latency a time; rings that act at the same time
share the wires between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynoffload.errors import ConfigError
from dynoffload.simulation.streams import Floats


@dataclass(frozen=True)
class Wire:
    """Bytes per second in each direction, and the seconds of a message without bytes.

    Raises:
        ConfigError: the rate is not positive, or the latency negative or infinite.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and 0 <= self.latency_s < math.inf):
            raise ConfigError(f"a wire has a rate above 0 and a latency of 0 or more: {self}")


@dataclass(frozen=True)
class Cluster:
    """Ranks, numbered node by node.

    Attributes:
        ranks: all of them.
        per_node: ranks of a node; 1 for a network that is the same everywhere.
        inside: a rank's port to its node.
        between: a node's wire to the other nodes.

    Raises:
        ConfigError: the ranks cannot be divided into nodes.
    """

    ranks: int
    per_node: int
    inside: Wire
    between: Wire

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1 or self.ranks % self.per_node:
            raise ConfigError(
                f"{self.ranks} ranks cannot be divided into nodes of {self.per_node}: both are 1 "
                "or more, and nodes are whole"
            )

    @staticmethod
    def flat(ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> Cluster:
        """Return ranks that reach one another at the same rate, wherever they are."""
        wire = Wire(bytes_per_s, latency_s)
        return Cluster(ranks, 1, wire, wire)

    def all_to_all(self, sent: Floats) -> float:
        """Return how long it takes until the last rank has all that is for it.

        Args:
            sent: bytes from each rank (row) to each rank (column); what stays costs nothing.

        Raises:
            ConfigError: it is no such matrix.
        """
        sent = np.asarray(sent, dtype=np.float64)
        if sent.shape != (self.ranks, self.ranks) or not (sent >= 0).all():
            raise ConfigError(
                f"an all-to-all of {self.ranks} ranks takes {self.ranks} x {self.ranks} bytes, 0 "
                f"or more, and this has the shape {sent.shape}"
            )
        node = np.arange(self.ranks) // self.per_node
        near = node[:, None] == node[None, :]
        others = ~np.eye(self.ranks, dtype=bool)
        local = np.where(near & others, sent, 0.0)
        count = self.ranks // self.per_node
        shape = (count, self.per_node, count, self.per_node)
        far = np.where(near, 0.0, sent).reshape(shape).sum(axis=(1, 3))
        return max(self._busiest(local, self.inside), self._busiest(far, self.between))

    def all_gather(self, whole: float, rings: Sequence[Sequence[int]]) -> float:
        """Return how long it takes until each rank of each ring has ``whole`` bytes, or its part of
        their sum.

        Args:
            whole: bytes of all parts of a ring together.
            rings: ranks that hold parts, in the order in which they hand them on; all that act at
                the same time, without a rank in common.
        """
        flows = np.zeros(self.ranks // self.per_node)
        crossing = []
        for ring in rings:
            nodes = [rank // self.per_node for rank in ring]
            steps = list(zip(nodes, nodes[1:] + nodes[:1], strict=True))
            crossing.append([source != target for source, target in steps])
            for source, target in steps:
                flows[source] += source != target
        longest = 0.0
        for ring, crosses in zip(rings, crossing, strict=True):
            if len(ring) < 2:
                continue
            part = whole / len(ring)
            step = 0.0
            if not all(crosses):
                step = self.inside.latency_s + part / self.inside.bytes_per_s
            if any(crosses):
                most = max(flows[rank // self.per_node] for rank in ring)
                step = max(step, self.between.latency_s + part * most / self.between.bytes_per_s)
            longest = max(longest, (len(ring) - 1) * step)
        return longest

    def rings(self, size: int, stride: int = 1) -> list[range]:
        """Return all rings of ``size`` ranks that are ``stride`` apart.

        Raises:
            ConfigError: the ranks cannot be divided so.
        """
        block = size * stride
        if size < 1 or stride < 1 or self.ranks % block:
            raise ConfigError(f"{self.ranks} ranks have no rings of {size}, {stride} apart")
        return [
            range(first + offset, first + block, stride)
            for first in range(0, self.ranks, block)
            for offset in range(stride)
        ]

    @staticmethod
    def _busiest(sent: Floats, wire: Wire) -> float:
        most = max(sent.sum(axis=0).max(), sent.sum(axis=1).max())
        return float(wire.latency_s + most / wire.bytes_per_s) if most else 0.0
