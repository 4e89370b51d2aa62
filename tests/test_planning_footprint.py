"""The footprint of a recorded step, against sizes worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynoffload.errors import BudgetError
from dynoffload.planning import Footprint, WorkingSet, footprint
from dynoffload.profiler import Phase, Recorder, Sample, Trace

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
    found = footprint(step(**options))
    assert found.parameters == weights
    assert found.gradients == weights
    assert found.state == 2 * weights + 2 * COUNTER
    assert found.activations == ROWS * WIDE * FLOAT + FLOAT
    assert found.total == 4 * weights + 2 * COUNTER + found.activations
    update = 4 * WIDE * NARROW * FLOAT + COUNTER
    assert (found.largest.phase, found.largest.nbytes) == (Phase.OPTIMIZER, update)
    assert found.largest.site in ("0.weight", "2.weight")


def test_a_budget_below_the_largest_operator_is_refused_with_need_and_have() -> None:
    largest = WorkingSet("aten.mm.default", "head", Phase.BACKWARD, 3000)
    found = Footprint(1, 2, 3, 4, largest)
    found.require(3000)
    with pytest.raises(
        BudgetError, match=r"aten.mm.default of head \(backward\).*3000 bytes.*2999 bytes.*raise"
    ):
        found.require(2999)


def test_an_empty_trace_has_no_footprint() -> None:
    with pytest.raises(ValueError, match="no operators"):
        footprint(Trace("net", "Net", 0, "a.py", Sample({})))
