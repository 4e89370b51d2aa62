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
    region = st.builds(RegionInfo, _names, st.sampled_from(KINDS), _bytes, st.just(-1), st.just(0))
    regions = draw(st.lists(region, max_size=5))
    used = st.lists(st.integers(0, len(regions) - 1), max_size=4) if regions else st.just([])
    count = draw(st.integers(0, 5))
    calls = [
        ModuleCall(draw(_names), draw(_names), draw(st.integers(-1, i - 1)), 0, count)
        for i in range(draw(st.integers(0, 4)))
    ]
    operator = st.builds(
        Operator,
        name=_names,
        phase=st.sampled_from(Phase),
        site=_names,
        call=st.integers(-1, len(calls) - 1),
        idioms=st.builds(Idioms, *[st.integers(0, 99)] * 6),
        bytes_read=_bytes,
        bytes_written=_bytes,
        seconds=st.floats(0, 1e6),
        reads=used.map(tuple),
        writes=used.map(tuple),
        memory=_bytes,
        flops=st.none() | _bytes,
        dtype=_names,
    )
    operators = draw(st.lists(operator, min_size=count, max_size=count))
    rows = draw(st.integers(0, 3))
    shape = (rows, 2) if draw(st.booleans()) else (rows,)
    elements = np.full(shape, draw(st.integers(-(1 << 62), 1 << 62)), np.int64)
    values = draw(st.dictionaries(_names, st.floats(allow_nan=False), max_size=4))
    sample = InputFeatures(values, elements)
    step = draw(st.integers(0, 1 << 40))
    named = [draw(_names) for _ in range(3)]
    return Trace(*named[:2], step, named[2], sample, regions, calls, operators)


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
