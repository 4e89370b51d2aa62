"""Chakra execution traces: what is written is read back by classes that protoc makes of Chakra's
own schema."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("google.protobuf", reason="protobuf is an extra")
pytest.importorskip("grpc_tools", reason="protoc is not installed")

from google.protobuf.proto import parse_length_prefixed
from grpc_tools import protoc

from dynoffload.cli import app
from dynoffload.errors import ClientError, TraceError
from dynoffload.integrations.chakra import dependencies_of, write_chakra
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
    """Return the module that protoc makes."""
    out, folder = tmp_path_factory.mktemp("schema"), Path(__file__).parent
    assert protoc.main(["protoc", f"-I{folder}", f"--python_out={out}", "et_def.proto"]) == 0
    sys.path.insert(0, str(out))
    try:
        return importlib.import_module("et_def_pb2")
    finally:
        sys.path.remove(str(out))


def _read(path: Path, classes: Any) -> tuple[Any, list[Any]]:
    with open(path, "rb") as file:
        metadata, nodes = parse_length_prefixed(classes.GlobalMetadata, file), []
        while (node := parse_length_prefixed(classes.Node, file)) is not None:
            nodes.append(node)
    return metadata, nodes


def _attributes(message: Any) -> dict[str, Any]:
    return {attr.name: getattr(attr, attr.WhichOneof("value")) for attr in message.attr}


def test_each_operator_is_read_back(trace: Trace, classes: Any, tmp_path: Path) -> None:
    metadata, nodes = _read(write_chakra(trace, tmp_path / "step.et"), classes)
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
            "num_ops": operator.flops,
            "tensor_size": operator.bytes_read + operator.bytes_written,
            "phase": operator.phase.value,
            "site": operator.site,
            "call": operator.call,
            "seconds": operator.seconds,
            "bytes_read": operator.bytes_read,
            "bytes_written": operator.bytes_written,
            **{f"idiom.{name}": count for name, count in operator.idioms._asdict().items()},
        }
    kinds = {attr.name: attr.WhichOneof("value") for attr in nodes[0].attr}  # the feeder's own
    feeder = {"is_cpu_op": "bool_val", "num_ops": "int64_val", "tensor_size": "uint64_val"}
    assert kinds.items() >= feeder.items()
    assert sum(node.duration_micros for node in nodes) == round(clock * 1e6)
    assert any(operator.flops for operator in trace.operators)
    found = [(list(node.data_deps), list(node.ctrl_deps)) for node in nodes]
    assert found == list(dependencies_of(trace.operators))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_any_order_that_keeps_the_dependencies_computes_the_same(
    trace: Trace, chance: random.Random
) -> None:
    waits = [{*data, *control} for data, control in dependencies_of(trace.operators)]
    order: list[int] = []
    while len(order) < len(waits):
        done = set(order)
        ready = [n for n, needs in enumerate(waits) if n not in done and needs <= done]
        order.append(chance.choice(ready))
    assert _values(trace, order) == _values(trace, range(len(waits)))


def _values(trace: Trace, order: Sequence[int]) -> Any:
    """Return what each operator sees of memory when they run in this order: of each region a digest
    of the operator that wrote it and all that it read."""
    memory: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    for number in order:
        operator = trace.operators[number]
        seen[number] = tuple(memory.get(region, "initial") for region in operator.reads)
        for region in operator.writes:
            memory[region] = hash((number, seen[number]))
    return seen, memory


def test_a_directory_that_is_missing_is_named(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no/step\.et.*make the directory"):
        write_chakra(trace, tmp_path / "no" / "step.et")


def test_without_protobuf_the_remedy_is_said(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf.proto", None)
    with pytest.raises(ClientError, match=r"pip install '\.\[chakra\]'"):
        write_chakra(trace, tmp_path / "step.et")
    assert not list(tmp_path.iterdir())


def test_the_command_exports_a_recorded_trace(trace: Trace, classes: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "step.trace", tmp_path / "step.et"
    save_trace(trace, source)
    done = CliRunner().invoke(app, ["export", str(source), "--chakra", str(target)])
    assert done.exit_code == 0, done.output
    assert f"wrote {target}" in done.stderr
    assert len(_read(target, classes)[1]) == len(trace.operators)
