"""Writes a recorded step as an MLCommons Chakra execution trace, for machine simulators.

The format is https://github.com/mlcommons/chakra, schema 1.0.0: a ``GlobalMetadata``, then one
``Node`` per operator, numbered from 0 in program order, each message preceded by its length.
Attributes that Chakra's feeder reads have its names and types: ``is_cpu_op`` (bool), ``num_ops``
(int64, the FLOPs), ``tensor_size`` (uint64). Further ones are ``phase``, ``site``, ``call``,
``seconds``, ``bytes_read``, ``bytes_written`` and the six ``idiom.*``. Inputs and outputs are names
of regions.

[Note: dependencies]  A *data* dependency points to the operator that last wrote a region. A
*control* dependency preserves program order without data flow: an operator that writes a region
waits for its last writer and for all readers since. An operator without other dependencies (a view,
a fill) depends on the previous one.

[Note: microseconds]  The format has whole microseconds, and many operators take less than one.
Start and end are rounded, not the duration, so durations add up to the time of the step;
``seconds`` is exact.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dynoffload.errors import TraceError
from dynoffload.integrations.imports import importing
from dynoffload.profiler.safefile import write_whole
from dynoffload.profiler.trace import Operator, Trace
from dynoffload.version import __version__

_SCHEMA_VERSION = "1.0.0"
_COMP_NODE = 4
_FIELDS: dict[str, str] = {
    "IOInfo": "string values 1",
    "AttributeProto": "string name 1, double double_val 3, int64 int64_val 9, uint64 uint64_val 13,"
    " bool bool_val 27, string string_val 29",
    "GlobalMetadata": "string version 1, AttributeProto* attr 2",
    "Node": "uint64 id 1, string name 2, int32 type 3, uint64* ctrl_deps 4, uint64* data_deps 5,"
    " uint64 start_time_micros 6, uint64 duration_micros 7, IOInfo inputs 8, IOInfo outputs 9,"
    " AttributeProto* attr 10",
}
"""The part of the schema that is written: type, name and number of each field; * means repeated."""


def write_chakra(trace: Trace, path: str | Path) -> Path:
    """Write a recorded step as a Chakra execution trace; an existing file is replaced.

    Args:
        trace: the step, whose operators ran on the CPU.
        path: of the file; ``.et`` by convention.

    Returns:
        The path.

    Raises:
        ClientError: protobuf is not installed.
        TraceError: the file cannot be written.
    """
    with importing("google.protobuf", "chakra"):
        from google.protobuf.proto import serialize_length_prefixed
    path, file = Path(path), io.BytesIO()
    for message in _messages(trace):
        serialize_length_prefixed(message, file)
    try:
        write_whole(path, file.getvalue())
    except OSError as error:
        raise TraceError(
            f"{path}: the execution trace cannot be written ({error.strerror or error}); make the"
            " directory or choose another"
        ) from error
    return path


def _classes() -> dict[str, Any]:
    """Return the classes of the schema's messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="et_def.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        made = file.message_type.add(name=message)
        for kind, name, number in (field.split() for field in fields.split(", ")):
            field = made.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
            if kind.endswith("*"):
                field.label = kinds.LABEL_REPEATED
            kind = kind.rstrip("*")
            if kind in _FIELDS:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{file.package}.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
            if name.endswith("_val"):
                field.oneof_index = 0
        if message == "AttributeProto":
            made.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{file.package}.{name}") for name in _FIELDS}
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


def _messages(trace: Trace) -> Iterator[Any]:
    """Yield the messages of a file, in order."""
    classes = _classes()
    attribute, node_of = classes["AttributeProto"], classes["Node"]

    def attributes(values: dict[str, Any]) -> list[Any]:
        fields = {bool: "bool_val", int: "int64_val", float: "double_val", str: "string_val"}
        unsigned = ("tensor_size", "bytes_read", "bytes_written")
        return [
            attribute(name=key, **{"uint64_val" if key in unsigned else fields[type(value)]: value})
            for key, value in values.items()
            if value is not None
        ]

    def names(regions: Iterable[int]) -> Any:
        return classes["IOInfo"](values=json.dumps([trace.regions[one].name for one in regions]))

    about = {name: getattr(trace, name) for name in ("network", "model", "source", "step")}
    yield classes["GlobalMetadata"](
        version=_SCHEMA_VERSION,
        attr=attributes({"producer": f"dynoffload {__version__}", **about}),
    )
    seconds = 0.0
    dependencies = dependencies_of(trace.operators)
    for number, (operator, (data, control)) in enumerate(
        zip(trace.operators, dependencies, strict=True)
    ):
        begin = round(seconds * 1e6)
        seconds += operator.seconds
        yield node_of(
            id=number,
            name=operator.name,
            type=_COMP_NODE,
            data_deps=data,
            ctrl_deps=control,
            start_time_micros=begin,
            duration_micros=round(seconds * 1e6) - begin,
            inputs=names(operator.reads),
            outputs=names(operator.writes),
            attr=attributes(
                {
                    "is_cpu_op": True,
                    "tensor_size": operator.bytes_read + operator.bytes_written,
                    "phase": operator.phase.value,
                    "site": operator.site,
                    "call": operator.call,
                    "seconds": operator.seconds,
                    "bytes_read": operator.bytes_read,
                    "bytes_written": operator.bytes_written,
                    "num_ops": operator.flops,
                    **{f"idiom.{name}": n for name, n in operator.idioms._asdict().items()},
                }
            ),
        )


def dependencies_of(operators: Iterable[Operator]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the numbers of each operator's data and control dependencies, each ascending; see
    [Note: dependencies]."""
    writer: dict[int, int] = {}  # region -> the last operator that wrote it
    readers: dict[int, list[int]] = {}  # region -> the operators that have read it since
    for number, operator in enumerate(operators):
        data = {writer[region] for region in operator.reads if region in writer}
        control = {writer[region] for region in operator.writes if region in writer}
        for region in operator.writes:
            control.update(readers.get(region, ()))
        if not data and not control and number:
            control.add(number - 1)
        yield sorted(data), sorted(control - data)
        for region in operator.reads:
            readers.setdefault(region, []).append(number)
        for region in operator.writes:
            writer[region], readers[region] = number, []
