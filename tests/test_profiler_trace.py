"""Traces on disk: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import io
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dynoffload.errors import TraceError
from dynoffload.profiler import (
    Idioms,
    ModuleCall,
    Operator,
    Phase,
    Recorder,
    RegionInfo,
    Sample,
    Trace,
)
from dynoffload.profiler.storage import seal

KINDS = ["parameter", "gradient", "state", "activation", "buffer", "input"]


@pytest.fixture(scope="module")
def trace() -> Trace:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append, source=lambda: "lib/a.py"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return traces[0]


@pytest.fixture
def path(trace: Trace, tmp_path: Path) -> Path:
    where = tmp_path / "step-000000.parquet"
    trace.save(where)
    return where


def test_a_recorded_trace_comes_back_equal(trace: Trace, path: Path) -> None:
    assert Trace.load(path) == trace
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_operators_are_plain_rows_for_other_readers(trace: Trace, path: Path) -> None:
    table = pq.read_table(path)
    assert table.num_rows == len(trace.operators)
    assert table["name"].to_pylist() == [op.name for op in trace.operators]
    assert table["stream"].to_pylist() == [op.idioms.stream for op in trace.operators]


_names = st.text(max_size=12)
_bytes = st.integers(0, 1 << 50)


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    regions = draw(
        st.lists(
            st.builds(RegionInfo, _names, st.sampled_from(KINDS), _bytes, st.just(-1), st.just(0)),
            max_size=5,
        )
    )
    indices = st.lists(st.integers(0, len(regions) - 1), max_size=4) if regions else st.just([])
    count = draw(st.integers(0, 5))
    calls = [
        ModuleCall(draw(_names), draw(_names), draw(st.integers(-1, i - 1)), 0, count)
        for i in range(draw(st.integers(0, 4)))
    ]
    operators = [
        Operator(
            name=draw(_names),
            phase=draw(st.sampled_from(Phase)),
            site=draw(_names),
            call=draw(st.integers(-1, len(calls) - 1)),
            idioms=Idioms(*draw(st.tuples(*[st.integers(0, 99)] * 6))),
            bytes_read=draw(_bytes),
            bytes_written=draw(_bytes),
            seconds=draw(st.floats(0, 1e6)),
            reads=tuple(draw(indices)),
            writes=tuple(draw(indices)),
            memory=draw(_bytes),
            flops=draw(st.none() | _bytes),
            dtype=draw(_names),
        )
        for _ in range(count)
    ]
    codes = draw(st.lists(st.integers(-(1 << 62), 1 << 62), max_size=6))
    elements = np.array(codes, np.int64)
    if len(codes) % 2 == 0 and codes and draw(st.booleans()):
        elements = elements.reshape(-1, 2)
    values = draw(st.dictionaries(_names, st.floats(allow_nan=False), max_size=4))
    return Trace(
        draw(_names), draw(_names), draw(st.integers(0, 1 << 40)), draw(_names),
        Sample(values, elements), regions, calls, operators,
    )  # fmt: skip


@given(made=_traces())
@settings(max_examples=60, deadline=None)
def test_any_trace_comes_back_equal(made: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    where = tmp_path_factory.mktemp("traces") / "t.parquet"
    made.save(where)
    assert Trace.load(where) == made


def test_missing_directory_and_missing_file_are_named(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        trace.save(tmp_path / "nowhere" / "t.parquet")
    with pytest.raises(TraceError, match="gone"):
        Trace.load(tmp_path / "gone.parquet")
    with pytest.raises(TraceError, match="not a file"):
        Trace.load(tmp_path)


def test_a_failed_write_leaves_the_old_trace(
    trace: Trace, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(where: Path, data: bytes) -> int:
        write(where, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TraceError, match="No space left"):
        trace.save(path)
    assert Trace.load(path) == trace
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_truncated_anywhere_is_an_error(path: Path) -> None:
    whole = path.read_bytes()
    for keep in [0, 1, 4, 8, len(whole) // 2, len(whole) - 9, len(whole) - 4, len(whole) - 1]:
        path.write_bytes(whole[:keep])
        with pytest.raises(TraceError, match=r"truncated or damaged.*record it again"):
            Trace.load(path)


def test_foreign_files_are_errors(path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), path)
    with pytest.raises(TraceError, match="not a dynoffload trace"):
        Trace.load(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(TraceError, match=path.name):
        Trace.load(path)
    path.write_text("step,seconds\n1,2\n")
    with pytest.raises(TraceError, match=path.name):
        Trace.load(path)


def _rewrite(path: Path, *, header: Any = None, columns: Any = None, **options: Any) -> None:
    """Write the trace again with its header or its columns changed by a function."""
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    if header is not None:
        known = json.loads(metadata[b"dynoffload.trace"])
        header(known)
        metadata[b"dynoffload.trace"] = json.dumps(known).encode()
    metadata.update(options.pop("metadata", {}))
    if columns is not None:
        table = columns(table)
    written = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata(metadata), written, **{"compression": "NONE", **options}
    )
    path.write_bytes(seal(written.getvalue()))


def test_the_rewriting_used_below_is_itself_faithful(trace: Trace, path: Path) -> None:
    _rewrite(path)
    assert Trace.load(path) == trace


@pytest.mark.parametrize("version", [b"0", b"4", b"one", b""])
def test_another_version_is_refused_with_the_remedy(path: Path, version: bytes) -> None:
    _rewrite(path, metadata={b"dynoffload.trace_version": version})
    with pytest.raises(TraceError, match="this release reads versions 1 to 3"):
        Trace.load(path)


def _first_version(path: Path) -> None:
    """Make a trace one of version 1, which had neither FLOPs nor dtypes."""
    _rewrite(
        path,
        columns=lambda table: table.drop_columns(["flops", "dtype"]),
        metadata={b"dynoffload.trace_version": b"1"},
    )


def test_a_trace_of_the_first_version_is_read_and_its_flops_are_unknown(
    trace: Trace, path: Path
) -> None:
    """And stay unknown where it is written again."""
    assert any(op.flops for op in trace.operators)
    assert {op.dtype for op in trace.operators} > {"float32"}
    _first_version(path)
    old = Trace.load(path)
    unknown = [replace(op, flops=None, dtype="") for op in trace.operators]
    assert old == replace(trace, operators=unknown)
    old.save(path)
    assert Trace.load(path) == old


def test_a_version_has_the_columns_of_that_version(path: Path) -> None:
    _rewrite(path, metadata={b"dynoffload.trace_version": b"1"})
    with pytest.raises(TraceError, match="columns are not those of a trace"):
        Trace.load(path)
    _first_version(path)
    _rewrite(path, metadata={b"dynoffload.trace_version": b"2"})
    with pytest.raises(TraceError, match="columns are not those of a trace"):
        Trace.load(path)


def test_compressed_columns_are_refused(path: Path) -> None:
    """A few bytes that stand for gigabytes need a codec; traces are written without one."""
    _rewrite(path, compression="ZSTD")
    with pytest.raises(TraceError, match="compressed"):
        Trace.load(path)


def _set(name: str, value: Any) -> Any:
    def change(table: pa.Table) -> pa.Table:
        position = table.schema.get_field_index(name)
        field = table.schema.field(name)
        filled = pa.array([value] * table.num_rows, field.type)
        return table.set_column(position, field, filled)

    return change


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("phase", 3),
        ("phase", -1),
        ("call", 10_000),
        ("call", -2),
        ("seconds", float("nan")),
        ("seconds", -1.0),
        ("bytes_read", -5),
        ("memory", -1),
        ("stencil", -1),
        ("flops", -2),
        ("reads", (1 << 20).to_bytes(4, "little")),
        ("writes", b"\xff\xff\xff\xff"),
        ("writes", b"abc"),
    ],
)
def test_columns_that_lie_are_errors(path: Path, name: str, value: Any) -> None:
    _rewrite(path, columns=_set(name, value))
    with pytest.raises(TraceError, match="damaged"):
        Trace.load(path)


def test_another_schema_is_an_error(path: Path) -> None:
    _rewrite(path, columns=lambda table: table.drop_columns(["memory"]))
    with pytest.raises(TraceError, match="columns"):
        Trace.load(path)
    with pytest.raises(TraceError):
        Trace.load(path)


def _put(key: str, value: Any) -> Any:
    return lambda header: header.__setitem__(key, value)


@pytest.mark.parametrize(
    "change",
    [
        _put("step", "one"),
        _put("network", 5),
        _put("elements", [1.5]),
        _put("elements", [1 << 70]),
        _put("elements", [1] * 70_000),
        lambda header: header.update(elements=[1], width=7),
        _put("width", -1),
        _put("values", []),
        _put("values", {"a": "text"}),
        _put("values", {"a": [1]}),
        _put("regions", []),
        _put("regions", [["a"], ["secret"], [1], [-1], [-1]]),
        _put("regions", [["a"], ["input"], [-1], [-1], [-1]]),
        _put("regions", [["a"], ["input"], [1], [10**9], [-1]]),
        _put("calls", [["a"], ["k"], [0], [0], [0]]),
        _put("calls", [["a"], ["k"], [-1], [5], [1]]),
        _put("calls", [["a"], ["k"], [-1], [0], [10**9]]),
        _put("calls", None),
        lambda header: header.pop("source"),
    ],
)
def test_headers_that_lie_are_errors(path: Path, change: Any) -> None:
    _rewrite(path, header=change)
    with pytest.raises(TraceError, match=path.name):
        Trace.load(path)


def test_a_header_nested_without_end_is_an_error(path: Path) -> None:
    _rewrite(path, metadata={b"dynoffload.trace": b"[" * 100_000})
    with pytest.raises(TraceError, match="damaged"):
        Trace.load(path)


def test_a_file_larger_than_any_trace_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynoffload.profiler.storage.MAX_FILE_BYTES", 100)
    with pytest.raises(TraceError, match="larger than any trace"):
        Trace.load(path)
    monkeypatch.undo()
    monkeypatch.setattr("dynoffload.profiler.storage.MAX_OPERATORS", 3)
    with pytest.raises(TraceError, match="claims"):
        Trace.load(path)


def test_random_damage_is_an_error(trace: Trace, path: Path) -> None:
    """Flipped and cut bytes, anywhere or in the footer, never escape as anything but `TraceError`,
    and never end the process, as pyarrow does for some damaged footers."""
    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(whole)
        first = chance.choice([0, len(whole) - 2000])
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(first, len(damaged))] = chance.randrange(256)
        if chance.random() < 0.2:
            start = chance.randrange(len(damaged))
            damaged[start : start + chance.randrange(64)] = b""
        path.write_bytes(damaged)
        if damaged != whole:
            with pytest.raises(TraceError, match=path.name):
                Trace.load(path)
