"""Traces on disk: what is written comes back. What else a file may hold: test_hostile_files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from synthetic_pilot import recorded_step

from dynoffload.profiler import (
    Idioms,
    InputFeatures,
    ModuleCall,
    Operator,
    Phase,
    RegionInfo,
    Trace,
    load_trace,
    save_trace,
)

KINDS = ["parameter", "gradient", "state", "activation", "buffer", "input"]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return recorded_step()


@pytest.fixture
def path(trace: Trace, tmp_path: Path) -> Path:
    where = tmp_path / "step-000000.trace"
    save_trace(trace, where)
    return where


def test_a_recorded_trace_comes_back_equal(trace: Trace, path: Path) -> None:
    assert load_trace(path) == trace


def test_the_operators_are_plain_columns_for_other_readers(trace: Trace, path: Path) -> None:
    """As docs/traces.md describes them."""
    with safe_open(path, framework="np") as file:
        texts = json.loads(file.get_tensor("document").tobytes())["texts"]
        names, seconds = (file.get_tensor(f"operators.{name}") for name in ("name", "seconds"))
        read = file.get_tensor("sizes")[file.get_tensor("operators.bytes_read")]
        idioms = file.get_tensor("idioms")[file.get_tensor("operators.idiom")]
    assert [texts[code] for code in names] == [op.name for op in trace.operators]
    assert seconds.tolist() == [op.seconds for op in trace.operators]
    assert read.tolist() == [op.bytes_read for op in trace.operators]
    assert idioms.tolist() == [list(op.idioms) for op in trace.operators]


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
        InputFeatures(values, elements), regions, calls, operators,
    )  # fmt: skip


@given(made=_traces())
@settings(max_examples=60, deadline=None)
def test_any_trace_comes_back_equal(made: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    where = tmp_path_factory.mktemp("traces") / "t.trace"
    save_trace(made, where)
    assert load_trace(where) == made


def test_a_source_that_is_no_text_is_written_as_text(trace: Trace, tmp_path: Path) -> None:
    """The name of a file in another encoding, as Python gives it."""
    save_trace(replace(trace, source="caf\udce9.py"), tmp_path / "t.trace")
    assert load_trace(tmp_path / "t.trace").source == "caf\\udce9.py"
