"""The footprint of a recorded step, against sizes worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynoffload.planning.footprint import footprint
from dynoffload.profiler import InputFeatures, Recorder, Trace

ROWS, WIDE, NARROW = 6, 32, 8
FLOAT, COUNTER = 4, 4


def step(**options: bool) -> Trace:
    """Record the second step of two linear layers under AdamW."""
    model = nn.Sequential(
        nn.Linear(NARROW, WIDE, bias=False), nn.ReLU(), nn.Linear(WIDE, NARROW, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append):
        for _ in range(2):
            model(torch.ones(ROWS, NARROW)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return traces[1]


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_sizes_are_those_worked_out_by_hand(options: dict[str, bool]) -> None:
    """However the optimizer groups its operators; ReLU's result and the loss are saved."""
    weights = 2 * WIDE * NARROW * FLOAT
    activations = ROWS * WIDE * FLOAT + FLOAT
    assert footprint(step(**options)) == 4 * weights + 2 * COUNTER + activations


def test_an_empty_trace_has_no_footprint() -> None:
    with pytest.raises(ValueError, match="no operators"):
        footprint(Trace("net", "Net", 0, "a.py", InputFeatures({})))
