"""The examples of clients train to the same bits with a budget, without one, and wrapped.

The commands are those of their docstrings, with a tiny network. What they print is compared, and
bit for bit each loss whose backward runs, and weights and optimizer state at the end. Where there
is a budget, a session must have paged.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from clients import assert_paged
from exactness import assert_same
from torch import Tensor
from torch.optim import Optimizer
from typer.testing import CliRunner

from dynoffload.cli import app
from dynoffload.runtime.session import Session

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = {
    "plain": ("--preset tiny --steps 2 --tokens 32", "1500KB", ()),
    "accelerate": ("--preset tiny --steps 2 --tokens 32", "1500KB", ("accelerate",)),
    "lightning": ("--preset tiny --steps 2 --tokens 32", "1500KB", ("lightning",)),
    "trainer": ("--hidden 32 --steps 2 --tokens 32", "1MB", ("transformers", "accelerate")),
    "experts": ("--hidden 32 --steps 2 --tokens 32", "1MB", ("transformers",)),
}


@dataclass
class Seen:
    """What scripts did in this process.

    Attributes:
        losses: each tensor whose ``backward()`` ran.
        optimizers: that they made; those that wrap another have its state.
        sessions: that were opened.
    """

    losses: list[Tensor] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    def taken(self) -> tuple[list[Tensor], list[Any], list[Session]]:
        """Return losses, weights and optimizer state, and sessions since the last call."""
        results = [
            [[group["params"] for group in optimizer.param_groups], optimizer.state_dict()]
            for optimizer in self.optimizers
        ]
        taken = self.losses, results, self.sessions
        self.losses, self.optimizers, self.sessions = [], [], []
        return taken


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    backward, made, opened = Tensor.backward, Optimizer.__init__, Session.__init__

    def on_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        found.losses.append(loss.detach().clone())
        backward(loss, *args, **kwargs)

    def on_optimizer(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        made(optimizer, *args, **kwargs)
        found.optimizers.append(optimizer)

    def on_session(session: Session, *args: Any, **kwargs: Any) -> None:
        opened(session, *args, **kwargs)
        found.sessions.append(session)

    monkeypatch.setattr(Tensor, "backward", on_backward)
    monkeypatch.setattr(Optimizer, "__init__", on_optimizer)
    monkeypatch.setattr(Session, "__init__", on_session)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TINY)
def test_an_example_trains_the_same_under_its_budget(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seen: Seen,
) -> None:
    options, budget, clients = TINY[name]
    for client in clients:
        pytest.importorskip(client)
    monkeypatch.chdir(tmp_path)
    script = EXAMPLES / f"train_{name}.py"
    commands = re.findall(
        r"^    ((?:python|dynoffload) .*)$", script.read_text().split('"""')[1], re.MULTILINE
    )
    assert [command.split()[0] for command in commands][:2] == ["python", "dynoffload"]

    def run(words: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), *words, *options.split()])
        capsys.readouterr()
        runpy.run_path(str(script), run_name="__main__")
        return losses(capsys.readouterr().out)

    printed = run([])
    assert printed
    expected_losses, expected, sessions = seen.taken()
    assert len(expected_losses) == 4
    assert expected
    assert not sessions
    for command in commands:
        text = command.replace("80MB", budget).replace("20", "2")
        program, *words = shlex.split(text.replace("examples/", f"{EXAMPLES}/"))
        if program == "python":
            output = run(words[1:])
        else:
            result = CliRunner().invoke(app, [*words, *options.split()])
            assert result.exit_code == 0, result.output
            if words[0] == "profile":
                assert list(tmp_path.glob("traces/*"))
                seen.taken()
                continue
            output = losses(result.stdout)
        exact, results, sessions = seen.taken()
        assert output == printed
        assert_same(exact, expected_losses, command)
        assert_same(results, expected, command)
        (session,) = sessions
        assert_paged(session, steps=2)


def losses(text: str) -> str:
    """Return the lines of ``text`` with a loss; clients print others with times."""
    return "\n".join(line for line in text.splitlines() if "loss " in line)
