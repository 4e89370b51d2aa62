"""Writing an execution trace: the messages of its nodes, one after the other.

What it is: `write_chakra`. What it is not: the rule of what depends on what (see
`dynoffload.integrations.chakra.graph`).

[Note: the file]
A trace is a ``GlobalMetadata`` and then its ``Node`` messages, each preceded by its length as a
varint of base 128. Nodes are numbered from 0 in program order. Attributes that Chakra's feeder
looks for have its names and types: ``is_cpu_op`` (bool), ``num_ops`` (int64), ``tensor_size``
(uint64). Ours are ``phase``, ``site``, ``call``, ``seconds``, ``bytes_read``, ``bytes_written``
and the six ``idiom.*``; of a transfer, ``region``. Inputs and outputs name regions.

[Note: microseconds]
The format counts whole microseconds, and many operators take less than one. Start and end are
rounded, not the duration, so that durations add up to the time of the step; ``seconds`` is exact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dynoffload.errors import TraceError
from dynoffload.integrations.chakra.graph import Node, nodes_of
from dynoffload.integrations.chakra.schema import SCHEMA_VERSION, Messages, load_messages
from dynoffload.planning.schedule import Kind, Schedule
from dynoffload.profiler.trace import Operator, Trace
from dynoffload.version import __version__


def write_chakra(
    trace: Trace,
    path: str | Path,
    *,
    schedule: Schedule | None = None,
    on_cpu: bool = True,
    num_ops: Sequence[int] | None = None,
) -> Path:
    """Write a recorded step as a Chakra execution trace; a file that is there is replaced.

    Args:
        trace: the step.
        path: where to; ``.et`` by custom.
        schedule: transfers to write as nodes that load and store memory, of a string of uses that
            are the operators of the trace and of regions that are the trace's, each by index.
        on_cpu: whether the operators ran on the CPU.
        num_ops: arithmetic operations of each operator; without them the FLOPs that the trace
            tells, which are those of products, convolutions and attention, and 0 for the rest. For
            an operator of which neither tells, as of a trace of an older release, the attribute is
            left out.

    Returns:
        The path.

    Raises:
        ClientError: if protobuf is not installed.
        TraceError: if the file cannot be written, ``num_ops`` has another length than the
            operators, or the schedule is not of this trace.
    """
    messages = load_messages()
    if num_ops is not None and len(num_ops) != len(trace.operators):
        raise TraceError(
            f"num_ops has {len(num_ops)} counts for {len(trace.operators)} operators: give one each"
        )
    nodes = nodes_of(trace, schedule)
    writer = _Writer(messages, trace, on_cpu, num_ops)
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(partial, "wb") as file:
            _frame(file, writer.metadata())
            for number, node in enumerate(nodes):
                _frame(file, writer.node(number, node))
        os.replace(partial, path)
    except OSError as error:
        if path.parent.is_dir():
            partial.unlink(missing_ok=True)
        raise TraceError(
            f"{path}: the execution trace cannot be written ({error.strerror or error}); make the"
            " directory or choose another"
        ) from error
    return path


def _frame(file: Any, message: Any) -> None:
    """Write a message after its length, low seven bits first, a set top bit meaning more."""
    content = message.SerializeToString()
    length = len(content)
    while length > 0x7F:
        file.write(bytes((length & 0x7F | 0x80,)))
        length >>= 7
    file.write(bytes((length,)))
    file.write(content)


class _Writer:
    """Makes messages of nodes, in order: it keeps the time."""

    def __init__(
        self, messages: Messages, trace: Trace, on_cpu: bool, num_ops: Sequence[int] | None
    ) -> None:
        self._messages = messages
        self._trace = trace
        self._on_cpu = on_cpu
        self._num_ops = num_ops
        self._seconds = 0.0

    def metadata(self) -> Any:
        """Return the message that a file begins with."""
        trace = self._trace
        attributes = [
            self._attribute("producer", f"dynoffload {__version__}"),
            self._attribute("network", trace.network),
            self._attribute("model", trace.model),
            self._attribute("source", trace.source),
            self._attribute("step", trace.step),
        ]
        return self._messages.metadata(version=SCHEMA_VERSION, attr=attributes)

    def node(self, number: int, node: Node) -> Any:
        """Return the message of a node."""
        transfer = node.transfer
        if transfer is None:
            message = self._operator(self._trace.operators[node.operator], node.operator)
        else:
            message = self._transfer(transfer, node.region)
        message.id = number
        message.data_deps.extend(node.data)
        message.ctrl_deps.extend(node.control)
        return message

    def _operator(self, operator: Operator, index: int) -> Any:
        message = self._messages.node(name=operator.name)
        message.type = self._messages.kinds["COMP_NODE"]
        message.start_time_micros = round(self._seconds * 1e6)
        self._seconds += operator.seconds
        message.duration_micros = round(self._seconds * 1e6) - message.start_time_micros
        message.inputs.values = self._names(operator.reads)
        message.outputs.values = self._names(operator.writes)
        add = self._attribute
        message.attr.extend(
            [
                add("is_cpu_op", self._on_cpu),
                add("tensor_size", operator.bytes_read + operator.bytes_written, "uint64_val"),
                add("phase", operator.phase.value),
                add("site", operator.site),
                add("call", operator.call),
                add("seconds", operator.seconds),
                add("bytes_read", operator.bytes_read, "uint64_val"),
                add("bytes_written", operator.bytes_written, "uint64_val"),
            ]
        )
        num_ops = operator.flops if self._num_ops is None else self._num_ops[index]
        if num_ops is not None:
            message.attr.append(add("num_ops", num_ops))
        for idiom, count in operator.idioms._asdict().items():
            message.attr.append(add(f"idiom.{idiom}", count))
        return message

    def _transfer(self, kind: Kind, region: int) -> Any:
        info = self._trace.regions[region]
        verb = "fetch" if kind is Kind.FETCH else "evict"
        message = self._messages.node(name=f"{verb} {info.name}")
        node_type = "MEM_LOAD_NODE" if kind is Kind.FETCH else "MEM_STORE_NODE"
        message.type = self._messages.kinds[node_type]
        message.start_time_micros = round(self._seconds * 1e6)
        message.attr.extend(
            [
                self._attribute("is_cpu_op", self._on_cpu),
                self._attribute("tensor_size", info.nbytes, "uint64_val"),
                self._attribute("region", info.name),
            ]
        )
        return message

    def _names(self, regions: Iterable[int]) -> str:
        return json.dumps([self._trace.regions[index].name for index in regions])

    def _attribute(self, name: str, value: bool | int | float | str, field: str = "") -> Any:
        """Return an attribute, in the field of its value's type if none is named."""
        kinds = {bool: "bool_val", int: "int64_val", float: "double_val", str: "string_val"}
        return self._messages.attribute(name=name, **{field or kinds[type(value)]: value})
