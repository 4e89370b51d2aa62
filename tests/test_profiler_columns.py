"""A trace's operators as arrays are those of its objects, whether it was recorded or read."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dynoffload.planning.outline import outline_of
from dynoffload.profiler import Recorder
from dynoffload.profiler.columns import Columns, Operators
from dynoffload.profiler.program import resolve
from dynoffload.profiler.storage import load_trace, save_trace
from dynoffload.profiler.trace import Operator, Trace


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """A step of a small network that was read from a file."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append):
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
    path = tmp_path / "step.trace"
    save_trace(traces[0], path)
    return load_trace(path)


def test_columns_of_a_file_are_those_of_its_operators(trace: Trace) -> None:
    assert isinstance(trace.operators, Operators)
    made = Columns.of(list(trace.operators))
    for field in fields(Columns):
        read = getattr(trace.operators.columns, field.name)
        assert np.array_equal(read, getattr(made, field.name)), field.name
    assert made.stops[-1] == len(made.used) > 0


def test_a_step_is_resolved_without_an_object_for_each_operator(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = trace.operators
    assert isinstance(operators, Operators)
    expected = resolve(Trace(**{**vars(trace), "operators": list(operators)}))

    def refuse() -> list[Operator]:
        raise AssertionError("an operator was made")

    monkeypatch.setattr(trace, "operators", Operators(operators.columns, refuse))
    found = resolve(trace)
    assert found.visits == expected.visits
    assert outline_of(found).names == outline_of(expected).names


def test_operators_are_a_sequence_and_travel_as_a_list(trace: Trace) -> None:
    operators = trace.operators
    assert len(operators) == len(list(operators)) > 5
    assert operators[0] == operators[:1][0] == next(iter(operators))
    assert operators == list(operators)
    assert operators != list(operators)[1:]
    sent = pickle.loads(pickle.dumps(operators))
    assert type(sent) is list
    assert sent == operators


def test_a_step_without_operators_has_columns_too() -> None:
    empty = Columns.of([])
    assert len(empty.phase) == len(empty.used) == 0
    assert empty.idioms.shape == (0, 6)
    assert empty.stops.tolist() == [0]
