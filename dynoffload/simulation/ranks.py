"""Ranks of a cluster: the wires between them, the rows they exchange, and timelines of their work.

Packets, switches and their congestion are not simulated.

[Note: wires]  Every rank has a port to the others of its node. Every node has one wire to all other
nodes, shared by its ranks. Both are full-duplex. Traffic inside and between nodes overlaps.

[Note: collectives]  All ranks begin at once. An all-to-all takes the time of the wire with most
bytes, in or out, plus one latency, as all its messages are sent at once. All-gathers and
reduce-scatters use rings: in each step every rank passes a part to the next, with one latency.
Rings that run at the same time share the wires between nodes.

[Note: order]  A resource of a rank runs one task at a time, in the order in which they were added,
like a stream. A task on the link is a collective: it begins when it is next on all ranks, takes the
longest time given for any rank, and ends on all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynoffload.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Wire:
    """A full-duplex wire: bytes per second in each direction, and latency in seconds.

    Raises:
        ConfigError: the rate is not positive, or the latency negative or infinite.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and 0 <= self.latency_s < math.inf):
            raise ConfigError(f"a wire has a rate above 0 and a latency of 0 or more: {self}")

    def seconds(self, sent: Floats) -> float:
        """Return the seconds of the busiest endpoint when ``sent`` [from, to] bytes are moved."""
        most = max(sent.sum(axis=0).max(), sent.sum(axis=1).max())
        return float(self.latency_s + most / self.bytes_per_s) if most else 0.0


@dataclass(frozen=True)
class Cluster:
    """Ranks, numbered node by node; see [Note: wires] and [Note: collectives].

    Attributes:
        ranks: number of ranks.
        per_node: ranks of a node; 1 for a uniform network.
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
        """Return a cluster with a uniform network."""
        wire = Wire(bytes_per_s, latency_s)
        return Cluster(ranks, 1, wire, wire)

    def all_to_all(self, sent: Floats) -> float:
        """Return the seconds of an all-to-all, until the last rank has received everything.

        Args:
            sent: bytes [from, to]; bytes that stay on a rank cost nothing.
        """
        count = self.ranks // self.per_node
        node = np.arange(self.ranks) // self.per_node
        near = node[:, None] == node[None, :]
        far = np.where(near, 0.0, sent).reshape(count, self.per_node, count, self.per_node)
        local = np.where(near & ~np.eye(self.ranks, dtype=bool), sent, 0.0)
        return max(self.inside.seconds(local), self.between.seconds(far.sum(axis=(1, 3))))

    def all_gather(self, whole: float, rings: Sequence[range]) -> float:
        """Return the seconds of an all-gather of ``whole`` bytes in each ring, or of a
        reduce-scatter.

        Args:
            whole: bytes of all parts of a ring together.
            rings: all rings that run at the same time; see `rings`.
        """
        flows = np.zeros(self.ranks // self.per_node)
        crossing = []
        for ring in rings:
            nodes = [rank // self.per_node for rank in ring]
            crosses = [a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
            np.add.at(flows, nodes, crosses)
            crossing.append((nodes, crosses))
        longest = 0.0
        for nodes, crosses in crossing:
            part, step = whole / len(nodes), 0.0
            if not all(crosses):
                step = self.inside.latency_s + part / self.inside.bytes_per_s
            if any(crosses):
                most = float(flows[nodes].max())
                step = max(step, self.between.latency_s + part * most / self.between.bytes_per_s)
            longest = max(longest, (len(nodes) - 1) * step)
        return longest

    def rings(self, size: int, stride: int = 1) -> list[range]:
        """Return all rings of ``size`` ranks that are ``stride`` apart.

        Raises:
            ConfigError: the ranks cannot be divided this way.
        """
        block = size * stride
        if size < 1 or stride < 1 or self.ranks % block:
            raise ConfigError(f"{self.ranks} ranks have no rings of {size}, {stride} apart")
        return [
            range(first + offset, first + block, stride)
            for first in range(0, self.ranks, block)
            for offset in range(stride)
        ]


@dataclass(frozen=True)
class Routing:
    """The number of rows each rank sends to each expert, and the placement of experts.

    Attributes:
        rows: counts [rank, expert].
        groups: groups of experts, on consecutive ranks; each replica has all of them.
        slices: ranks that share each expert; a row goes to all of them.
    """

    rows: Floats
    groups: int
    slices: int = 1

    @staticmethod
    def even(ranks: int, experts: int, rows: float, groups: int, slices: int = 1) -> Routing:
        """Return a routing that spreads ``rows`` of each rank evenly."""
        return Routing(np.full((ranks, experts), rows / experts), groups, slices)

    def skewed(self, skew: float, generator: np.random.Generator) -> Routing:
        """Return a random routing of the same number of rows.

        Args:
            skew: the expert of popularity rank k, from 1, is chosen k ** -skew times as often as
                the first, on all ranks; 0 is uniform.
            generator: draws the rows and the popularity of the experts.
        """
        ranks, experts = self.rows.shape
        favour = generator.permutation(np.arange(1, experts + 1) ** -float(skew))
        count = round(float(self.rows[0].sum()))
        drawn = generator.multinomial(count, favour / favour.sum(), size=ranks)
        return Routing(drawn.astype(np.float64), self.groups, self.slices)

    def part(self, parts: int) -> Routing:
        """Return the routing of one of ``parts`` equal parts of the batch."""
        return Routing(self.rows / parts, self.groups, self.slices)

    def sent(self) -> Floats:
        """Return the rows [from, to] between ranks, including those that stay on a rank."""
        ranks, held = len(self.rows), self.groups * self.slices
        of_groups = self.rows.reshape(ranks, self.groups, -1).sum(axis=2)
        sent = np.zeros((ranks, ranks))
        for first in range(0, ranks, held):  # the ranks that hold all experts once
            own = slice(first, first + held)
            sent[own, own] = np.repeat(of_groups[own], self.slices, axis=1)
        return sent


class Resource(Enum):
    """The resource that a task occupies."""

    COMPUTE = 0
    LINK = 1
    COPY = 2


class Timeline:
    """Tasks of all ranks; see [Note: order].

    Args:
        ranks: number of ranks.

    Attributes:
        busy: seconds that each rank's resource works, without waiting.
    """

    def __init__(self, ranks: int) -> None:
        self.busy = {resource: np.zeros(ranks) for resource in Resource}
        self._free = {resource: np.zeros(ranks) for resource in Resource}

    def add(self, resource: Resource, seconds: ArrayLike, after: Sequence[Floats] = ()) -> Floats:
        """Queue a task on its resource; return the time at which each rank ends it.

        Args:
            resource: the resource it occupies.
            seconds: its duration, one for all ranks or one per rank.
            after: results of earlier calls; those tasks must have ended on the same rank.
        """
        own = np.asarray(seconds, dtype=np.float64)
        start = np.maximum.reduce([self._free[resource], *after])
        if resource is Resource.LINK:
            start, own = np.full_like(start, start.max()), own.max()
        self.busy[resource] = self.busy[resource] + own
        self._free[resource] = start + own
        return self._free[resource]

    @property
    def seconds(self) -> float:
        """Seconds until the last rank has ended."""
        return max(float(ends.max()) for ends in self._free.values())
