"""The examples of clients train to the same bits with a budget, without one, and wrapped.

The commands are those of their docstrings, with a tiny network; what they print is compared.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynoffload.cli import app

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = {
    "plain": ("--preset tiny --steps 2 --tokens 32", "1500KB", ()),
    "accelerate": ("--preset tiny --steps 2 --tokens 32", "1500KB", ("accelerate",)),
    "lightning": ("--preset tiny --steps 2 --tokens 32", "1500KB", ("lightning",)),
    "trainer": ("--hidden 32 --steps 2 --tokens 32", "1MB", ("transformers", "accelerate")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TINY)
def test_an_example_prints_the_same_under_its_budget(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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

    expected = run([])
    assert expected
    for command in commands:
        text = command.replace("80MB", budget).replace("20", "2")
        program, *words = shlex.split(text.replace("examples/", f"{EXAMPLES}/"))
        if program == "python":
            assert run(words[1:]) == expected
            continue
        result = CliRunner().invoke(app, [*words, *options.split()])
        assert result.exit_code == 0, result.output
        if words[0] == "run":
            assert losses(result.stdout) == expected
            assert re.search(r"\w+, \d steps: median step", result.stderr)


def losses(text: str) -> str:
    """Return the lines of ``text`` with a loss; clients print others with times."""
    return "\n".join(line for line in text.splitlines() if "loss " in line)
