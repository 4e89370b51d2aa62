"""Traces on disk: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_traces import pack, repack, unpack
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save
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
    load_trace,
    save_trace,
    trace_files,
)

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
    where = tmp_path / "step-000000.trace"
    save_trace(trace, where)
    return where


def test_a_recorded_trace_comes_back_equal(trace: Trace, path: Path) -> None:
    assert load_trace(path) == trace
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_operators_are_plain_columns_for_other_readers(trace: Trace, path: Path) -> None:
    """As docs/traces.md describes them."""
    with safe_open(path, framework="np") as file:
        texts = json.loads(file.metadata()["dynoffload.trace"])["texts"]
        names, seconds = (file.get_tensor(f"operators.{name}") for name in ("name", "seconds"))
        read = file.get_tensor("sizes")[file.get_tensor("operators.bytes_read")]
        idioms = file.get_tensor("idioms")[file.get_tensor("operators.idiom")]
    assert [texts[code] for code in names] == [op.name for op in trace.operators]
    assert seconds.tolist() == [op.seconds for op in trace.operators]
    assert read.tolist() == [op.bytes_read for op in trace.operators]
    assert idioms.tolist() == [list(op.idioms) for op in trace.operators]


def test_equal_traces_are_equal_files(trace: Trace, path: Path, tmp_path: Path) -> None:
    save_trace(trace, tmp_path / "again.trace")
    assert (tmp_path / "again.trace").read_bytes() == path.read_bytes()


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
    where = tmp_path_factory.mktemp("traces") / "t.trace"
    save_trace(made, where)
    assert load_trace(where) == made


def test_missing_directory_and_missing_file_are_named(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        save_trace(trace, tmp_path / "nowhere" / "t.trace")
    with pytest.raises(TraceError, match="gone"):
        load_trace(tmp_path / "gone.trace")
    with pytest.raises(TraceError, match="not a file"):
        load_trace(tmp_path)


def test_a_failed_write_leaves_the_old_trace(
    trace: Trace, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(where: Path, data: bytes) -> int:
        write(where, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TraceError, match="No space left"):
        save_trace(trace, path)
    assert load_trace(path) == trace
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_truncated_anywhere_is_an_error(path: Path) -> None:
    whole = path.read_bytes()
    for keep in [0, 1, 4, 8, 9, 300, len(whole) // 2, len(whole) - 9, len(whole) - 1]:
        path.write_bytes(whole[:keep])
        with pytest.raises(TraceError, match=r"truncated or damaged.*record it again"):
            load_trace(path)


def test_foreign_files_are_errors(path: Path) -> None:
    path.write_bytes(save({"a": np.ones(2)}))
    with pytest.raises(TraceError, match="not a dynoffload trace"):
        load_trace(path)
    path.write_bytes(save({"a": np.ones(2)}, {"format": "np"}))
    with pytest.raises(TraceError, match="not a dynoffload trace"):
        load_trace(path)
    for foreign in (pickle.dumps({"a": 1}), b"step,seconds\n1,2\n"):
        path.write_bytes(foreign)
        with pytest.raises(TraceError, match=path.name):
            load_trace(path)


def test_a_trace_of_an_older_release_is_refused_with_the_remedy(tmp_path: Path) -> None:
    old = tmp_path / "step-000000.parquet"
    old.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(TraceError, match=r"older releases.*again with `dynoffload profile`"):
        load_trace(old)
    with pytest.raises(TraceError, match=r"older releases cannot be read.*'dynoffload profile -o"):
        trace_files(tmp_path)


def _rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Write the trace again with its document or its arrays changed by a function."""
    document, arrays = unpack(path.read_bytes())
    change(document, arrays)
    path.write_bytes(repack(document, arrays))


def test_the_rewriting_used_below_is_itself_faithful(trace: Trace, path: Path) -> None:
    _rewrite(path, lambda document, arrays: None)
    assert load_trace(path) == trace


@pytest.mark.parametrize("version", [0, 3, 5, "one", None])
def test_another_version_is_refused_with_the_remedy(path: Path, version: Any) -> None:
    _rewrite(path, lambda document, arrays: document.update(version=version))
    with pytest.raises(TraceError, match="this release reads version 4"):
        load_trace(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("phase", 3),
        ("phase", -1),
        ("call", 10_000),
        ("call", -2),
        ("seconds", float("nan")),
        ("seconds", -1.0),
        ("seconds", 1.7e308),
        ("name", 1 << 20),
        ("site", -1),
        ("dtype", 1 << 20),
        ("idiom", 99),
        ("idiom", -1),
        ("memory", -1),
        ("bytes_read", 1 << 20),
        ("flops", -2),
        ("reads", -1),
        ("writes", 100),
        ("used", 1 << 20),
        ("used", -1),
    ],
)
def test_columns_that_lie_are_errors(path: Path, name: str, value: Any) -> None:
    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        array = arrays[f"operators.{name}"]
        arrays[f"operators.{name}"] = np.full(array.shape, value, np.asarray(value).dtype)

    _rewrite(path, change)
    with pytest.raises(TraceError, match="damaged"):
        load_trace(path)


def test_counts_below_zero_are_errors(path: Path) -> None:
    """Only FLOPs may be -1, which says that they are not known."""
    for name in ("bytes_read", "bytes_written", "memory"):

        def change(document: dict[str, Any], arrays: dict[str, Any], name: str = name) -> None:
            arrays["sizes"] = np.array([-1, *arrays["sizes"][1:]])
            arrays[f"operators.{name}"] = np.zeros_like(arrays[f"operators.{name}"])

        whole = path.read_bytes()
        _rewrite(path, change)
        with pytest.raises(TraceError, match="less than nothing"):
            load_trace(path)
        path.write_bytes(whole)


def test_other_arrays_are_an_error(path: Path) -> None:
    whole = path.read_bytes()
    for name in unpack(whole)[1]:
        _rewrite(path, lambda document, arrays, name=name: arrays.pop(name))  # type: ignore[misc]
        with pytest.raises(TraceError, match="damaged"):
            load_trace(path)
        path.write_bytes(whole)
    _rewrite(path, lambda document, arrays: arrays.update(other=np.zeros(3, np.int8)))
    with pytest.raises(TraceError, match="not those of a trace"):
        load_trace(path)


def _put(key: str, value: Any) -> Any:
    return lambda document, arrays: document.__setitem__(key, value)


def _set(**columns: Any) -> Any:
    made = {name.replace("__", "."): np.array(column) for name, column in columns.items()}
    return lambda document, arrays: arrays.update(made)


def _table(table: str, **columns: Any) -> Any:
    return _set(**{f"{table}__{name}": [value] for name, value in columns.items()})


@pytest.mark.parametrize(
    "change",
    [
        _put("step", "one"),
        _put("network", 5),
        _put("values", []),
        _put("values", {"a": "text"}),
        _put("values", {"a": [1]}),
        _put("texts", {}),
        _put("texts", None),
        lambda document, arrays: document["texts"].__setitem__(0, 1),
        lambda document, arrays: document["texts"].pop(),
        lambda document, arrays: document.pop("source"),
        _set(elements=[1.5]),
        _set(elements=[1] * 70_000),
        _set(elements=1),
        _set(elements=[[]]),
        _set(elements=[[1] * 2000]),
        _table("regions", name=0, kind=6, nbytes=0, born=-1, died=-1),
        _table("regions", name=0, kind=0, nbytes=10**6, born=-1, died=-1),
        _table("regions", name=0, kind=0, nbytes=0, born=10**9, died=-1),
        _table("regions", name=0, kind=0, nbytes=0, born=-1, died=-2),
        _table("calls", path=0, shape_key=0, parent=0, start=0, stop=0),
        _table("calls", path=0, shape_key=0, parent=-1, start=5, stop=1),
        _table("calls", path=0, shape_key=0, parent=-1, start=0, stop=10**9),
    ],
)
def test_documents_and_tables_that_lie_are_errors(path: Path, change: Any) -> None:
    _rewrite(path, change)
    with pytest.raises(TraceError, match=path.name):
        load_trace(path)


def test_a_document_nested_without_end_is_an_error(path: Path) -> None:
    _, arrays = unpack(path.read_bytes())
    path.write_bytes(pack(b"[" * 100_000, arrays))
    with pytest.raises(TraceError, match="damaged"):
        load_trace(path)


def test_a_file_larger_than_any_trace_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynoffload.profiler.storage.MAX_FILE_BYTES", 100)
    with pytest.raises(TraceError, match="larger than any trace"):
        load_trace(path)
    monkeypatch.undo()
    for name, complaint in (("ROWS", "claims"), ("HEADER_BYTES", "too long"), ("USES", "rows")):
        monkeypatch.setattr(f"dynoffload.profiler.storage.MAX_{name}", 3)
        with pytest.raises(TraceError, match=complaint):
            load_trace(path)
        monkeypatch.undo()


def test_random_damage_is_an_error(trace: Trace, path: Path) -> None:
    """Flipped and cut bytes, anywhere or in the header, escape as nothing but `TraceError`."""
    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(whole)
        stop = chance.choice([2000, len(whole)])
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(stop)] = chance.randrange(256)
        if chance.random() < 0.2:
            start = chance.randrange(len(damaged))
            damaged[start : start + chance.randrange(64)] = b""
        path.write_bytes(damaged)
        if damaged != whole:
            with pytest.raises(TraceError, match=path.name):
                load_trace(path)
