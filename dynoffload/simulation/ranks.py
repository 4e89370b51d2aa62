"""Ranks: the wires between them, the rows that they exchange, and when their work runs.

Packets, switches and congestion in them are not simulated.

[Note: wires]  Every rank has a port to the others of its node, and every node one wire to all other
nodes, which its ranks share; both carry as much in as out at the same time. Traffic inside and
between nodes goes side by side.

[Note: collectives]  All ranks begin at once. An all-to-all lasts as long as the wire through which
most bytes go, in or out, and one latency, as all its messages are on their way at once. Gathers and
scattered sums go in rings: every rank hands a part on to the next, one latency a time; rings that
act at the same time share the wires between nodes.

[Note: order]  A resource of a rank does one task at a time, in the order in which they were added,
as streams do. A task on the link is a collective: it begins when its turn has come on all ranks,
lasts as long as the longest of its ranks says, and ends on all of them at once.
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
    """Bytes per second in each direction, and the seconds of a message without bytes.

    Raises:
        ConfigError: the rate is not positive, or the latency negative or infinite.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and 0 <= self.latency_s < math.inf):
            raise ConfigError(f"a wire has a rate above 0 and a latency of 0 or more: {self}")

    def seconds(self, sent: Floats) -> float:
        """Return how long the busiest of those that send ``sent`` [from, to] bytes takes."""
        most = max(sent.sum(axis=0).max(), sent.sum(axis=1).max())
        return float(self.latency_s + most / self.bytes_per_s) if most else 0.0


@dataclass(frozen=True)
class Cluster:
    """Ranks, numbered node by node; see [Note: wires] and [Note: collectives].

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
            sent: bytes [from, to]; what stays on a rank costs nothing.
        """
        count = self.ranks // self.per_node
        node = np.arange(self.ranks) // self.per_node
        near = node[:, None] == node[None, :]
        far = np.where(near, 0.0, sent).reshape(count, self.per_node, count, self.per_node)
        local = np.where(near & ~np.eye(self.ranks, dtype=bool), sent, 0.0)
        return max(self.inside.seconds(local), self.between.seconds(far.sum(axis=(1, 3))))

    def all_gather(self, whole: float, rings: Sequence[range]) -> float:
        """Return how long it takes until each rank of each ring has ``whole`` bytes, or its part of
        their sum.

        Args:
            whole: bytes of all parts of a ring together.
            rings: all that act at the same time; see `rings`.
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


@dataclass(frozen=True)
class Routing:
    """Which rank's rows go to which expert, and where experts lie.

    Attributes:
        rows: counts [rank, expert].
        groups: of experts, on ranks side by side; all of them once in each replica.
        slices: ranks that divide each expert; a row goes to all of them.
    """

    rows: Floats
    groups: int
    slices: int = 1

    @staticmethod
    def even(ranks: int, experts: int, rows: float, groups: int, slices: int = 1) -> Routing:
        """Return the routing of ``rows`` of each rank, spread evenly."""
        return Routing(np.full((ranks, experts), rows / experts), groups, slices)

    def skewed(self, skew: float, generator: np.random.Generator) -> Routing:
        """Return a routing of as many rows, drawn at random.

        Args:
            skew: the expert that is in favour at place k, from 1, is chosen k ** -skew times as
                often as the first, on all ranks; 0 favours none.
            generator: of the draws; it also says which experts are in favour.
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
        """Return the rows from each rank to each rank, those that stay on one included."""
        ranks, held = len(self.rows), self.groups * self.slices
        of_groups = self.rows.reshape(ranks, self.groups, -1).sum(axis=2)
        sent = np.zeros((ranks, ranks))
        for first in range(0, ranks, held):  # the ranks that hold all experts once
            own = slice(first, first + held)
            sent[own, own] = np.repeat(of_groups[own], self.slices, axis=1)
        return sent


class Resource(Enum):
    """What a task occupies."""

    COMPUTE = 0
    LINK = 1
    COPY = 2


class Timeline:
    """Tasks of all ranks; see [Note: order].

    Args:
        ranks: how many there are.

    Attributes:
        busy: seconds that each rank's resource works; what waits does not.
    """

    def __init__(self, ranks: int) -> None:
        self.busy = {resource: np.zeros(ranks) for resource in Resource}
        self._free = {resource: np.zeros(ranks) for resource in Resource}

    def add(self, resource: Resource, seconds: ArrayLike, after: Sequence[Floats] = ()) -> Floats:
        """Add a task behind all others of its resource; return when each rank has ended it.

        Args:
            resource: it occupies.
            seconds: it takes, on all ranks or on each.
            after: what earlier calls returned for tasks that must have ended on the same rank.
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
        """Until the last rank has ended."""
        return max(float(ends.max()) for ends in self._free.values())
