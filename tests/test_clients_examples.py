"""The examples of clients print the same losses with a budget, without one, and wrapped.

The commands are those of their docstrings, with a tiny network. Where there is a budget, a session
must have paged. That no bit differs is tested with each client.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from clients import assert_paged
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TINY)
def test_an_example_trains_the_same_under_its_budget(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, budget, clients = TINY[name]
    for client in clients:
        pytest.importorskip(client)
    monkeypatch.chdir(tmp_path)
    sessions: list[Session] = []
    opened = Session.__init__

    def on_session(session: Session, *args: Any, **kwargs: Any) -> None:
        opened(session, *args, **kwargs)
        sessions.append(session)

    monkeypatch.setattr(Session, "__init__", on_session)
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
                sessions.clear()
                continue
            output = losses(result.stdout)
        assert output == printed
        (session,) = sessions
        assert_paged(session, steps=2)
        sessions.clear()


def losses(text: str) -> str:
    """Return the lines of ``text`` with a loss; clients print others with times."""
    return "\n".join(line for line in text.splitlines() if "loss " in line)
