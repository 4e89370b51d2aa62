"""``run --wrap`` and ``profile --wrap``: a script that knows nothing of dynoffload, same bits.

Each test runs a script plainly and wrapped and compares what it prints, which tells every bit.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from torch import nn
from torch.optim import Optimizer
from typer.testing import CliRunner

from dynoffload import config
from dynoffload.cli import app
from dynoffload.managed import managers

RUNNER = CliRunner(env={"COLUMNS": "200"})

INIT, CALL = Optimizer.__init__, nn.Module.__call__

NETWORK = """
import hashlib, io, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, width)

    def forward(self, x):
        return self.head(self.dropout(self.body(x).relu()))

def tell(*models, optimizer):
    text = io.BytesIO()
    state = optimizer.state_dict()["state"]
    parts = [p.detach() for model in models for p in model.parameters()]
    for part in parts + [v for key in sorted(state) for _, v in sorted(state[key].items())]:
        text.write(part.numpy().tobytes())
    print(hashlib.sha256(text.getvalue()).hexdigest())

torch.manual_seed(0)
"""

PLAIN = (
    NETWORK
    + """
def main():
    net = Net()
    with torch.no_grad():
        net(torch.randn(2, 32))
    frozen = Net().requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(6):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step > 2):
                x = torch.randn(4, 32)
                loss = (net(x) - frozen(x)).square().mean()
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
        if len(sys.argv) > 1 and step == 2:
            raise SystemExit(int(sys.argv[1]))
    net.eval()
    print(net(torch.ones(1, 32)).sum().item().hex())
    tell(net, optimizer=optimizer)

main()
"""
)


@pytest.fixture(autouse=True)
def _nothing_stays() -> object:
    """Whatever a script does, nothing is watched or offloaded after it."""
    yield
    assert Optimizer.__init__ is INIT
    assert nn.Module.__call__ is CALL
    assert not managers
    assert config.defaults() == config.Defaults()


def write(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(text)
    return path


def plainly(script: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the script prints by itself."""
    capsys.readouterr()
    argv, sys.argv = sys.argv, [str(script)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv
    return capsys.readouterr().out


WRAP = ["run", "--wrap", "--budget", "100KiB"]


def test_an_unmodified_loop_is_offloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accumulation, clipping, autocast, a frozen model beside it, and use after training."""
    script = write(tmp_path, PLAIN)
    result = RUNNER.invoke(app, [*WRAP, str(script)])
    assert result.exit_code == 0, result.output
    assert "Net, 6 steps: median step" in result.stderr
    assert "of the budget of 100KiB" in result.stderr
    assert result.stdout == plainly(script, capsys)


def test_an_unmodified_loop_is_profiled(tmp_path: Path) -> None:
    script, traces = write(tmp_path, PLAIN), tmp_path / "traces"
    result = RUNNER.invoke(
        app, ["profile", "--wrap", "-o", str(traces), "--steps", "2", str(script)]
    )
    assert result.exit_code == 0, result.output
    first = {path.name: path.read_bytes() for path in traces.iterdir()}
    assert len(first) == 2
    RUNNER.invoke(app, ["profile", "--wrap", "-o", str(traces), "--steps", "1", str(script)])
    assert len(list(traces.iterdir())) == 3  # beside what was there
    assert all((traces / name).read_bytes() == was for name, was in first.items())


def test_a_script_that_ends_early_ends_the_block(tmp_path: Path) -> None:
    script = write(tmp_path, PLAIN)
    result = RUNNER.invoke(app, [*WRAP, str(script), "7"])
    assert result.exit_code == 7
    assert "Net, 3 steps" in result.stderr
    script.write_text(PLAIN.replace("raise SystemExit", "raise ValueError"))
    result = RUNNER.invoke(app, [*WRAP, str(script), "7"])
    assert result.exit_code == 1
    assert "Net, 3 steps" in result.stderr


# What is ambiguous or refused, and the remedy

PARTS = """
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
net.head(net.body(torch.randn(4, 32))).square().mean().backward()
"""
ADVERSARIES = """
maker, judge = Net(), Net()
ours = torch.optim.Adam(maker.parameters(), lr=1e-3)
theirs = torch.optim.SGD(judge.parameters(), lr=1e-3, momentum=0.9)
judge(maker(torch.randn(4, 32))).mean().backward()
"""
ITSELF = """
import dynoffload
net = Net()
optimizer = torch.optim.AdamW(net.parameters())
with dynoffload.offload(net, optimizer):
    net(torch.randn(4, 32)).sum().backward()
"""


@pytest.mark.parametrize(
    ("text", "budget", "told"),
    [
        (
            PARTS,
            "1MB",
            "is a Sequential, which lacks 2 of the 14 parameters of its AdamW: write 'w",
        ),
        (ADVERSARIES, "1MB", "makes 2 optimizers (Adam, SGD), and --wrap offloads one model with"),
        (ITSELF, "1MB", "the script offloads its Net by itself: run it without --wrap"),
        (PLAIN.replace("AdamW(", "LBFGS(").replace(", lr=1e-2", ""), "1MB", "LBFGS updates all"),
        (PLAIN, "8KiB", "a budget of 8KiB cannot hold"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_with_its_place(
    text: str, budget: str, told: str, tmp_path: Path
) -> None:
    script = write(tmp_path, text if text.startswith(NETWORK) else NETWORK + text)
    result = RUNNER.invoke(app, ["run", "--wrap", "--budget", budget, str(script)])
    assert result.exit_code == 1
    assert told in result.stderr
    assert f"({script}:" in result.stderr


AGAIN = (
    NETWORK
    + """
def train(net, parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(3):
        net(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    tell(net, optimizer=optimizer)

first, second = Net(), Net()
train(first, first.head.parameters() if len(sys.argv) > 1 else first.parameters())
if len(sys.argv) > 1:
    train(first, first.body.parameters())
train(second, second.parameters())
"""
)


@pytest.mark.parametrize("same", [False, True], ids=["another model", "the same model"])
def test_a_later_optimizer_trains_as_ever_and_is_told_of(
    same: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sweep of trainings, or a second phase: only the first is offloaded."""
    script = write(tmp_path, AGAIN.replace("len(sys.argv) > 1", str(same)))
    expected = plainly(script, capsys)
    assert not caplog.records
    found = RUNNER.invoke(app, ["run", "--wrap", "--budget", "200kB", str(script)])
    assert found.exit_code == 0, found.output
    assert expected in found.output
    (said,) = [r.getMessage() for r in caplog.records if "another optimizer" in r.getMessage()]
    assert "(AdamW)" in said
    assert ("of the model that it offloads" in said) is same


def test_an_optimizer_that_is_gone_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLAIN.replace(
        "    for step", "    optimizer = torch.optim.SGD(net.parameters())\n    for step", 1
    )
    script = write(tmp_path, text)
    result = RUNNER.invoke(app, [*WRAP, str(script)])
    assert result.exit_code == 0, result.output
    assert result.stdout == plainly(script, capsys)


def test_a_script_that_trains_nothing_is_told(tmp_path: Path) -> None:
    script = write(tmp_path, "import torch\ntorch.nn.Linear(2, 2)(torch.ones(2))\n")
    result = RUNNER.invoke(app, [*WRAP, str(script)])
    assert result.exit_code == 0
    assert f"{script} ended without a training call that --wrap could see" in result.stderr
    result = RUNNER.invoke(app, ["profile", "--wrap", "-o", str(tmp_path / "t"), str(script)])
    assert result.exit_code == 1
    assert "it must make an optimizer, then call a module" in result.stderr


def test_wrapping_takes_a_budget(tmp_path: Path) -> None:
    script = write(tmp_path, "raise AssertionError")
    assert RUNNER.invoke(app, ["run", "--wrap", str(script)]).exit_code == 2
