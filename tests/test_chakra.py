"""Chakra execution traces: what is written is read back by classes made from Chakra's own schema.

The classes are those that protoc makes of the schema's text where grpcio-tools is installed, else
those of the writer; the framing is read by a reader of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("google.protobuf", reason="protobuf is an extra")

from dynoffload.cli import app
from dynoffload.errors import ClientError, TraceError
from dynoffload.integrations.chakra import schema, write_chakra
from dynoffload.integrations.chakra.graph import Node, nodes_of
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Action, Kind, Schedule, Use
from dynoffload.profiler import Recorder, Trace, save_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append, source=lambda: "lib/a.py"):
        for _ in range(2):
            model(torch.ones(8, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return traces[1]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the module that protoc makes, or what stands in for it."""
    if importlib.util.find_spec("grpc_tools") is None:
        made = schema.load_messages()
        return types.SimpleNamespace(GlobalMetadata=made.metadata, Node=made.node, **made.kinds)
    out = tmp_path_factory.mktemp("schema")
    _protoc(f"--python_out={out}")
    sys.path.insert(0, str(out))
    try:
        return importlib.import_module("et_def_pb2")
    finally:
        sys.path.remove(str(out))


def _protoc(*options: str) -> None:
    from grpc_tools import protoc

    folder = schema.SCHEMA.parent
    assert protoc.main(["protoc", f"-I{folder}", *options, schema.SCHEMA.name]) == 0


def _read(path: Path, classes: Any) -> tuple[Any, list[Any]]:
    with open(path, "rb") as file:
        metadata, nodes = classes.GlobalMetadata(), []
        for number, content in enumerate(_frames(file)):
            message = metadata if number == 0 else classes.Node()
            message.ParseFromString(content)
            if number:
                nodes.append(message)
    return metadata, nodes


def _frames(file: BinaryIO) -> Iterator[bytes]:
    while first := file.read(1):
        length, shift = first[0] & 0x7F, 7
        while first[0] & 0x80:
            first = file.read(1)
            length |= (first[0] & 0x7F) << shift
            shift += 7
        content = file.read(length)
        assert len(content) == length > 0  # Chakra's reader takes a length of zero for the end.
        yield content


def _attributes(message: Any) -> dict[str, Any]:
    return {attr.name: getattr(attr, attr.WhichOneof("value")) for attr in message.attr}


def test_the_schema_is_read_as_protoc_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="protoc is not installed")
    from google.protobuf import descriptor_pb2

    _protoc(f"--descriptor_set_out={tmp_path / 'set'}")
    compiled = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes())
    (wanted,) = compiled.file
    for message in wanted.message_type:
        for field in message.field:
            field.ClearField("json_name")
    assert schema.descriptor_of(schema.SCHEMA.read_text()) == wanted


@pytest.mark.parametrize("text", ["import 'a';", "message A { B b = 1; }", "message A { int32 a"])
def test_more_of_the_language_than_is_known_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"et_def\.proto"):
        schema.descriptor_of(text)


def test_each_operator_is_read_back(trace: Trace, classes: Any, tmp_path: Path) -> None:
    path = write_chakra(trace, tmp_path / "step.et", num_ops=range(len(trace.operators)))
    metadata, nodes = _read(path, classes)
    assert metadata.version == "1.0.0"
    about = _attributes(metadata)
    assert about["model"] == "Sequential"
    assert (about["network"], about["source"], about["step"]) == (trace.network, "lib/a.py", 1)
    assert len(nodes) == len(trace.operators)
    names = [region.name for region in trace.regions]
    clock = 0.0
    for index, (node, operator) in enumerate(zip(nodes, trace.operators, strict=True)):
        assert (node.id, node.name, node.type) == (index, operator.name, classes.COMP_NODE)
        assert json.loads(node.inputs.values) == [names[region] for region in operator.reads]
        assert json.loads(node.outputs.values) == [names[region] for region in operator.writes]
        assert node.start_time_micros == round(clock * 1e6)
        clock += operator.seconds
        assert node.start_time_micros + node.duration_micros == round(clock * 1e6)
        assert _attributes(node) == {
            "is_cpu_op": True,
            "num_ops": index,
            "tensor_size": operator.bytes_read + operator.bytes_written,
            "phase": operator.phase.value,
            "site": operator.site,
            "call": operator.call,
            "seconds": operator.seconds,
            "bytes_read": operator.bytes_read,
            "bytes_written": operator.bytes_written,
            **{f"idiom.{name}": count for name, count in operator.idioms._asdict().items()},
        }
    assert sum(node.duration_micros for node in nodes) == round(clock * 1e6)


def test_attributes_have_the_types_that_the_feeder_reads(
    trace: Trace, classes: Any, tmp_path: Path
) -> None:
    """It reads ``num_ops`` from ``int64_val`` and so on, whatever is set."""
    counts = [1] * len(trace.operators)
    _, nodes = _read(write_chakra(trace, tmp_path / "a.et", num_ops=counts, on_cpu=False), classes)
    for node in nodes:
        fields = {attr.name: attr.WhichOneof("value") for attr in node.attr}
        assert fields["is_cpu_op"] == "bool_val"
        assert fields["num_ops"] == "int64_val"
        assert fields["tensor_size"] == "uint64_val"
        assert not _attributes(node)["is_cpu_op"]
    _, nodes = _read(write_chakra(trace, tmp_path / "b.et"), classes)
    told = [_attributes(node)["num_ops"] for node in nodes[: len(trace.operators)]]
    assert told == [one.flops for one in trace.operators]
    assert any(told)
    unknown = tuple(one._replace(flops=None) for one in trace.operators)
    _, nodes = _read(write_chakra(replace(trace, operators=unknown), tmp_path / "c.et"), classes)
    assert "num_ops" not in _attributes(nodes[0])  # What is not known is not said.


def test_data_dependencies_name_the_last_writer(trace: Trace, classes: Any, tmp_path: Path) -> None:
    _, nodes = _read(write_chakra(trace, tmp_path / "step.et"), classes)
    operators = trace.operators
    for index, node in enumerate(nodes):
        writers = {
            max(earlier)
            for region in operators[index].reads
            if (earlier := [i for i in range(index) if region in operators[i].writes])
        }
        assert set(node.data_deps) == writers
    _assert_valid(nodes)
    assert not [node.id for node in nodes[1:] if not node.data_deps and not node.ctrl_deps]


def _assert_valid(nodes: list[Any]) -> None:
    """Numbers are unique, dependencies point to earlier nodes, none is named twice."""
    assert [node.id for node in nodes] == list(range(len(nodes)))
    for node in nodes:
        dependencies = [*node.data_deps, *node.ctrl_deps]
        assert all(0 <= number < node.id for number in dependencies)
        assert len(set(dependencies)) == len(dependencies)


def _schedule(trace: Trace, share: float) -> Schedule:
    uses = [
        Use(
            regions=tuple(dict.fromkeys(operator.reads + operator.writes)),
            creates=tuple(r for r in operator.writes if trace.regions[r].born == index),
            writes=operator.writes,
            seconds=operator.seconds,
        )
        for index, operator in enumerate(trace.operators)
    ]
    sizes = [region.nbytes for region in trace.regions]
    return LookAhead().plan(uses, sizes, int(sum(sizes) * share), ())


def test_transfers_of_a_schedule_are_loads_and_stores(
    trace: Trace, classes: Any, tmp_path: Path
) -> None:
    schedule = _schedule(trace, 0.3)
    _, nodes = _read(write_chakra(trace, tmp_path / "step.et", schedule=schedule), classes)
    _assert_valid(nodes)
    moved = {classes.MEM_LOAD_NODE: 0, classes.MEM_STORE_NODE: 0, classes.COMP_NODE: 0}
    for node in nodes:
        moved[node.type] += _attributes(node)["tensor_size"]
    assert moved[classes.MEM_LOAD_NODE] == schedule.bytes_in > 0
    assert moved[classes.MEM_STORE_NODE] == schedule.bytes_out > 0
    operators = [node.name for node in nodes if node.type == classes.COMP_NODE]
    assert operators == [operator.name for operator in trace.operators]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from([0.25, 0.5, None]), st.randoms(use_true_random=False))
def test_any_order_that_keeps_the_dependencies_computes_the_same(
    trace: Trace, share: float | None, chance: random.Random
) -> None:
    nodes = nodes_of(trace, None if share is None else _schedule(trace, share))
    assert _values(trace, nodes, _shuffled(nodes, chance)) == _values(
        trace, nodes, range(len(nodes))
    )


def _shuffled(nodes: list[Node], chance: random.Random) -> list[int]:
    """Return an order in which the dependencies allow the nodes to run."""
    waits = [len(node.data) + len(node.control) for node in nodes]
    followers: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for earlier in node.data + node.control:
            followers[earlier].append(number)
    ready = [number for number, count in enumerate(waits) if count == 0]
    order = []
    while ready:
        number = ready.pop(chance.randrange(len(ready)))
        order.append(number)
        for follower in followers[number]:
            waits[follower] -= 1
            if waits[follower] == 0:
                ready.append(follower)
    assert len(order) == len(nodes)
    return order


def _values(trace: Trace, nodes: list[Node], order: Any) -> Any:
    """Return what each node sees of memory when nodes run in this order.

    A value is a digest of the operator that wrote it and all that it read; a store takes the
    region away.
    """
    fast: dict[int, Any] = {}
    slow: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    for number in order:
        node = nodes[number]
        if node.transfer is Kind.EVICT:
            seen[number] = slow[node.region] = fast[node.region]
            fast[node.region] = "gone"
        elif node.transfer is Kind.FETCH:
            seen[number] = fast[node.region] = slow.get(node.region, "initial")
        else:
            operator = trace.operators[node.operator]
            seen[number] = tuple(fast.get(region, "initial") for region in operator.reads)
            assert "gone" not in seen[number]
            for region in operator.writes:
                fast[region] = hash((node.operator, seen[number]))
    return seen, fast, slow


def test_a_schedule_of_something_else_is_refused(trace: Trace, tmp_path: Path) -> None:
    for action in (Action(0, Kind.FETCH, 10**6), Action(10**6, Kind.FETCH, 0)):
        schedule = Schedule((action,))
        with pytest.raises(TraceError, match="operators of this trace"):
            write_chakra(trace, tmp_path / "step.et", schedule=schedule)
    with pytest.raises(TraceError, match="give one each"):
        write_chakra(trace, tmp_path / "step.et", num_ops=[1])
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_missing_is_named(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no/step\.et.*make the directory"):
        write_chakra(trace, tmp_path / "no" / "step.et")


def test_without_protobuf_the_remedy_is_said(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema.load_messages.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(ClientError, match=r"pip install 'dynoffload\[chakra\]'"):
        write_chakra(trace, tmp_path / "step.et")
    assert not list(tmp_path.iterdir())


def test_the_command_exports_a_recorded_trace(trace: Trace, classes: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "step.trace", tmp_path / "step.et"
    save_trace(trace, source)
    done = CliRunner().invoke(app, ["export", str(source), "--chakra", str(target)])
    assert done.exit_code == 0, done.output
    assert f"wrote {target}" in done.stderr
    assert len(_read(target, classes)[1]) == len(trace.operators)
