"""Log of the step being recorded: its calls and operators; `finish` returns the trace.

[Note: a node's sequence number finds its module call]
Autograd numbers the nodes of one thread in the order forward creates them. Saving the next number
at each module entry and exit cuts the numbers into ranges, each belonging to one innermost call. In
backward, looking up the running node's number among the cuts gives the call that created it. This
costs two entries per module call and none per operator, and keeps no graph alive. Nodes that
accumulate gradients have no number; they belong to the module that owns their parameter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch

from dynoffload.profiler.experts import unit_path
from dynoffload.profiler.input_features import InputFeatures, merge_inputs
from dynoffload.profiler.regions import RegionTable
from dynoffload.profiler.routing import RoutingHint
from dynoffload.profiler.signatures import Signature, dtype_of, traffic
from dynoffload.profiler.trace import ModuleCall, Operator, Phase, RegionInfo, Trace, owner_of

_sequence_number = torch._C._autograd._get_sequence_nr


class StepLog:
    """The calls, operators and regions of one step."""

    def __init__(self) -> None:
        self.regions = RegionTable()
        self.samples: list[InputFeatures] = []
        self.source = ""
        self.hints: list[RoutingHint] = []
        self.slices: dict[str, int] = {}
        self._operators: list[Operator] = []
        self._calls: list[ModuleCall] = []
        self._last_call: dict[str, int] = {}
        self._cuts: list[int] = []  # Sequence number from which ...
        self._cut_calls: list[int] = []  # ... nodes belong to this call.
        self._next_number = 0  # The next sequence number, as of the last operator.

    def __len__(self) -> int:
        """Return how many operators the step has so far."""
        return len(self._operators)

    def enter(self, path: str, key: str, parent: int) -> int:
        """Record that a module call begins in forward; return its index."""
        call = len(self._calls)
        self._calls.append(ModuleCall(path, key, parent, len(self), len(self)))
        self._last_call[path] = call
        self.cut(call)
        return call

    def run_experts(self, call: int, hit: Sequence[int]) -> None:
        """Record the experts that ``call``, of a fused layer, runs."""
        path = self._calls[call].path
        for number in hit:
            self._calls.append(ModuleCall(unit_path(path, number), "", call, len(self), len(self)))

    def leave(self, call: int, outer: int) -> None:
        """Record that ``call`` has ended and that ``outer`` (-1: none) continues."""
        self._calls[call] = self._calls[call]._replace(stop=len(self))
        self.cut(outer)

    def cut(self, call: int) -> None:
        """Assign graph nodes created from now on to ``call``."""
        self._cuts.append(_sequence_number())
        self._cut_calls.append(call)

    def cut_within_backward(self, call: int) -> None:
        """Assign graph nodes that backward itself creates (double backward) to ``call``.

        The current operator's nodes are already numbered, so the cut is placed at the next
        sequence number as of the previous operator.
        """
        if self._cut_calls and self._cut_calls[-1] != call:
            self._cuts.append(max(self._next_number, self._cuts[-1]))
            self._cut_calls.append(call)

    def call_of_node(self, sequence: int) -> int:
        """Return the call whose forward created the node with this number, or -1."""
        position = bisect_right(self._cuts, sequence) - 1
        return self._cut_calls[position] if position >= 0 else -1

    def last_call_of(self, path: str) -> int:
        """Return the latest forward call of a module, or -1."""
        return self._last_call.get(path, -1)

    def recomputed(self, path: str, outer: int) -> int:
        """Return the forward call that is being recomputed inside ``outer`` (-1: unknown).

        This is the latest call of the path that ``outer`` encloses, else its latest call at all.
        """
        if outer >= 0:
            for call in range(len(self._calls) - 1, outer, -1):
                if self._calls[call].path == path and self._encloses(outer, call):
                    return call
        return self.last_call_of(path)

    def record(
        self,
        signature: Signature,
        phase: Phase,
        call: int,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: object,
        seconds: float,
    ) -> None:
        """Append one executed operator."""
        regions = self.regions
        reads: dict[int, None] = {}  # in order
        writes: dict[int, None] = {}
        bytes_read = bytes_written = 0
        flops: int | None = 0
        dtype = ""
        site = self._calls[call].path if call >= 0 else ""
        if signature.allocates:  # Else it is a view and touches nothing.
            moved = traffic(signature, args, kwargs, result)
            bytes_read, bytes_written = moved.bytes_read, moved.bytes_written
            dtype = dtype_of(moved)
            if signature.flops is not None:
                flops = signature.flops(args, kwargs, result)
            for tensor in moved.reads:
                reads |= dict.fromkeys(regions.read(tensor))
            for tensor in moved.writes:
                writes |= dict.fromkeys(regions.write(tensor))
            for tensor in moved.results:
                for index in regions.make(tensor, site):
                    if index not in reads:  # Else it only aliases an argument.
                        writes[index] = None
        self._operators.append(
            Operator(
                signature.name,
                phase,
                site,
                call,
                signature.idioms,
                bytes_read,
                bytes_written,
                seconds,
                tuple(reads),
                tuple(writes),
                regions.live,
                flops,
                dtype,
            )
        )
        regions.clock = len(self._operators)
        self._next_number = _sequence_number()

    def reopen(self) -> None:
        """Relabel the operators that ran since the last backward from optimizer to forward.

        Needed when another sample begins (they prepared it) or another backward begins (they
        computed its loss): the step is not over.
        """
        for index in range(len(self._operators) - 1, -1, -1):
            if self._operators[index].phase is not Phase.OPTIMIZER:
                break
            self._operators[index] = self._operators[index]._replace(phase=Phase.FORWARD)

    def finish(self, network: str, model: str, step: int) -> Trace:
        """Return the trace of the step. Do not use the log afterwards."""
        regions = self.regions.infos
        self.regions.close()
        operators = [
            op._replace(site=_owner(op, regions))
            if op.phase is Phase.OPTIMIZER and op.call < 0
            else op
            for op in self._operators
        ]
        sample = merge_inputs(self.samples) if self.samples else InputFeatures({})
        return Trace(
            network,
            model,
            step,
            self.source,
            sample,
            regions,
            self._calls,
            operators,
            self.hints,
            self.slices,
        )

    def _encloses(self, outer: int, call: int) -> bool:
        while call > outer:
            call = self._calls[call].parent
        return call == outer


def _owner(operator: Operator, regions: Sequence[RegionInfo]) -> str:
    """Return the module that owns all regions an optimizer operator used; ``""`` if not one."""
    owners = {owner_of(regions[i]) for i in operator.reads + operator.writes}
    owners.discard(None)
    return (owners.pop() or "") if len(owners) == 1 else ""
