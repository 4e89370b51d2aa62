"""A script under ``dynoffload profile``: what it asks its session for is there, and is true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dynoffload
from dynoffload.config import clear_defaults, set_defaults
from dynoffload.profiler import load_trace


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[Path]:
    """Profile, as the command does, into the directory returned."""
    set_defaults(profile_dir=tmp_path / "traces")
    yield tmp_path / "traces"
    clear_defaults()


def test_a_script_that_looks_at_its_session(
    traces: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dynoffload.offload(model, optimizer, budget="1MB") as session:
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.flush()
        assert (session.backend, session.paging) == ("profile", False)
        assert (session.model, session.optimizer) == (model, optimizer)
        assert session.stats[["seconds", "stall_s", "bytes_in", "peak_fast_bytes"]].tail().empty
        files = session.report(tmp_path / "run.html")
    assert "nothing was offloaded" in caplog.text
    assert files.page.exists()
    assert files.log.exists()
    assert [load_trace(path).step for path in sorted(traces.iterdir())] == [0, 1]


@pytest.mark.parametrize("noted", [True, False])
def test_a_model_on_meta_gets_its_weights(traces: Path, noted: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if noted:
        dynoffload.materialize(model)
    with dynoffload.offload(model, optimizer, budget="1MB"):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert len(list(traces.iterdir())) == 1


def test_a_network_beside_traces_of_another_is_told(
    traces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two blocks of one script, as of a GAN, are both recorded."""
    for width in (8, 4):
        assert "another network" not in caplog.text
        model = nn.Linear(width, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dynoffload.offload(model, optimizer, budget="1MB"):
            model(torch.randn(2, width)).sum().backward()
            optimizer.step()
    assert "holds traces of another network, such as step-000000.trace" in caplog.text
    assert len(list(traces.iterdir())) == 2
