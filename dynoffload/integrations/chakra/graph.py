"""The nodes of an execution trace and what each depends on.

What it is: `nodes_of`, which makes of a recorded step, and if wanted of a schedule of transfers, a
list of `Node`s. What it is not: aware of protobuf (see `dynoffload.integrations.chakra.writing`).

[Note: dependencies]
A *data* dependency leads from a node to the one that gave a region the bytes it needs: the operator
that last wrote it, the load that brought it back, or, for a load, the store before it. Readers of
Chakra traces issue a node as soon as its data dependencies are met. A *control* dependency says
that program order has to be kept although no bytes flow: who writes a region, or takes it away,
waits for those who read it and for the one who wrote it before; a transfer waits for the operator
that it may start after, and a load for the store before it in the schedule, which makes room. An
operator that nothing else orders (a view, a fill) stands after the one before it. All dependencies
point to earlier nodes, so they have no cycle.

An eviction of a region that was not written since it came is no node, as it moves nothing; a load
then waits for its readers in its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dynoffload.errors import TraceError
from dynoffload.planning.schedule import Kind, Schedule
from dynoffload.profiler.trace import Trace


@dataclass(frozen=True)
class Node:
    """One operator or one transfer.

    Attributes:
        operator: index of the operator, -1 for a transfer.
        transfer: direction of the transfer, None for an operator.
        region: index of the region that is transferred, -1 for an operator.
        data: numbers of the nodes whose bytes it needs, ascending.
        control: numbers of the other nodes that it has to wait for, ascending.
    """

    operator: int
    transfer: Kind | None
    region: int
    data: tuple[int, ...]
    control: tuple[int, ...]


def nodes_of(trace: Trace, schedule: Schedule | None = None) -> list[Node]:
    """Return the nodes of a step in an order in which they may run; a node's number is its index.

    Args:
        trace: the step.
        schedule: transfers, of a string of uses that are the operators of the trace and of regions
            that are the trace's, each by index.

    Raises:
        TraceError: if the schedule names a region or a position that the trace does not have.
    """
    return _Ordering(trace).nodes(schedule)


class _Ordering:
    """Who wrote and who read each region, as nodes are appended."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._nodes: list[Node] = []
        self._source: dict[int, int] = {}  # region -> the node that last gave it its bytes
        self._stored: dict[int, int] = {}  # region -> the node that last stored it
        self._dirty: set[int] = set()  # regions written since they were loaded or stored
        self._readers: dict[int, list[int]] = {}  # region -> the nodes that have read them since
        self._operator = -1  # The last operator's node, ...
        self._store = -1  # ... and the last store's.

    def nodes(self, schedule: Schedule | None) -> list[Node]:
        """Return all nodes."""
        actions = () if schedule is None else schedule.actions
        count, regions = len(self._trace.operators), len(self._trace.regions)
        for action in actions:
            if not (0 <= action.position <= count and 0 <= action.region < regions):
                raise TraceError(
                    f"the schedule moves region {action.region} at position {action.position},"
                    f" but the trace has {regions} regions and {count} operators: make it of uses"
                    " that are the operators of this trace"
                )
        due = itertools.groupby(sorted(actions, key=lambda a: a.position), lambda a: a.position)
        moves = {position: [(a.kind, a.region) for a in group] for position, group in due}
        for index in range(count + 1):
            for kind, region in moves.get(index, ()):
                self._add_transfer(kind, region)
            if index < count:
                self._add_operator(index)
        return self._nodes

    def _add_operator(self, index: int) -> None:
        operator = self._trace.operators[index]
        data = {self._source[r] for r in operator.reads if r in self._source}
        control: set[int] = set()
        for region in operator.writes:
            control.update(self._readers.get(region, ()))
            control.update(self._known(region))
        if not data and not control and self._operator >= 0:
            control.add(self._operator)
        self._operator = self._append(Node(index, None, -1, *_apart(data, control)))
        for region in operator.reads:
            self._readers.setdefault(region, []).append(self._operator)
        for region in operator.writes:
            self._source[region] = self._operator
            self._readers[region] = []
        self._dirty.update(operator.writes)

    def _add_transfer(self, kind: Kind, region: int) -> None:
        if kind is Kind.EVICT and region not in self._dirty:
            return
        before = {*self._known(region), *self._readers.get(region, ()), self._operator} - {-1}
        self._dirty.discard(region)
        if kind is Kind.EVICT:
            node = Node(-1, kind, region, *_apart(set(self._known(region)), before))
            self._store = self._stored[region] = self._append(node)
        else:
            data = {self._stored[region]} if region in self._stored else set()
            node = Node(-1, kind, region, *_apart(data, (before | {self._store}) - {-1}))
            self._append(node)
        self._source[region] = len(self._nodes) - 1
        self._readers[region] = []

    def _known(self, region: int) -> Iterator[int]:
        if region in self._source:
            yield self._source[region]

    def _append(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1


def _apart(data: set[int], control: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(sorted(data)), tuple(sorted(control - data))
