"""`profile`: traces from a model and batches, without a loop of one's own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynoffload.errors import TraceError
from dynoffload.experiments import zoo
from dynoffload.profiler import Phase, load_trace, profile


def test_one_trace_per_batch_with_its_source(tmp_path: Path) -> None:
    model = zoo.build("tree", "tiny")
    samples = list(itertools.islice(zoo.samples("tree", max_nodes=48), 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paths = profile(model, samples, out=tmp_path / "traces", optimizer=optimizer)
    assert [path.name for path in paths] == [f"step-{i:06d}.trace" for i in range(3)]
    traces = [load_trace(path) for path in paths]
    assert [trace.source for trace in traces] == [sample.source for sample in samples]
    assert [trace.step for trace in traces] == [0, 1, 2]
    for trace in traces:
        assert {op.phase for op in trace.operators} == set(Phase)


def test_without_an_optimizer_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    before = [p.clone() for p in model.parameters()]
    paths = profile(model, [torch.ones(2, 4)] * 2, out=tmp_path, loss=lambda out, _: out.sum())
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
    for path in paths:
        assert {op.phase for op in load_trace(path).operators} == {Phase.FORWARD, Phase.BACKWARD}


@dataclass
class _Result:
    loss: torch.Tensor


class _Net(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.shape = shape

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        loss = self.linear(x if y is None else x + y).sum()
        return {
            "tensor": loss, "dict": {"loss": loss}, "tuple": (loss, x), "object": _Result(loss)
        }[self.shape]  # fmt: skip


@pytest.mark.parametrize("shape", ["tensor", "dict", "tuple", "object"])
def test_the_loss_is_found(shape: str, tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    batches: list[Any] = [x, (x,), [x, x], {"x": x, "y": x}]
    assert len(profile(_Net(shape), batches, out=tmp_path)) == 4


def test_what_gives_no_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="pass loss="):
        profile(nn.Linear(4, 2), [torch.ones(2, 4)], out=tmp_path)
    with pytest.raises(TraceError, match="nothing to profile"):
        profile(_Net("tensor"), [], out=tmp_path)
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(TraceError, match="taken"):
        profile(_Net("tensor"), [torch.ones(2, 4)], out=taken)


def test_features_and_source_are_the_users(tmp_path: Path) -> None:
    (path,) = profile(
        _Net("tensor"),
        [torch.ones(2, 4)],
        out=tmp_path,
        features=lambda x: {"rows": float(len(x))},
        source=lambda batch: f"rows-{len(batch)}",
    )
    trace = load_trace(path)
    assert trace.sample.values == {"rows": 2.0}
    assert trace.source == "rows-2"


def test_the_progress_bar_appears_only_on_terminals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [torch.ones(2, 4)] * 3
    profile(_Net("tensor"), batches, out=tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    profile(_Net("tensor"), batches, out=tmp_path, progress=False)
    assert "profile" not in capsys.readouterr().err
    profile(_Net("tensor"), batches, out=tmp_path)
    captured = capsys.readouterr()
    assert "profile" in captured.err
    assert captured.out == ""


def test_numbering_goes_on_beside_traces_of_the_same_network_alone(tmp_path: Path) -> None:
    batches, loss = [torch.ones(2, 4)], lambda out, _: out.sum()
    profile(nn.Linear(4, 1), batches, out=tmp_path, loss=loss)
    with pytest.raises(TraceError, match=r"another network, such as step-000000\.trace"):
        profile(nn.Linear(4, 2), batches, out=tmp_path, loss=loss)
    (path,) = profile(nn.Linear(4, 1), batches, out=tmp_path, loss=loss)
    assert path.name == "step-000001.trace"
    assert load_trace(path).step == 1


def test_nothing_is_written_beside_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "step-000000.trace"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(TraceError, match=r"step-000000\.trace"):
        profile(nn.Linear(4, 1), [torch.ones(2, 4)], out=tmp_path, loss=lambda out, _: out.sum())
    assert list(tmp_path.iterdir()) == [broken]
