"""What the README and the examples' own words tell a user to type does what they say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*words: str, cwd: Path) -> str:
    """Run a Python command in ``cwd`` and return what it printed."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, check=False, cwd=cwd
    )
    assert done.returncode == 0, f"{words}: {done.stderr[-2000:]}"
    return done.stdout


def test_the_ten_lines_run_as_printed(tmp_path: Path) -> None:
    """Six losses that fall, the statistics, and the three files; with fewer and shorter steps."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    shorter = block.replace("range(20)", "range(6)").replace("length=256", "length=64")
    printed = run("-c", shorter, cwd=tmp_path).splitlines()
    losses = [float(line) for line in printed[:6]]
    assert sum(losses[3:]) < sum(losses[:3])
    assert "peak_fast_bytes" in printed[6]
    peaks = [int(line.split()[-1]) for line in printed[-5:]]
    assert max(peaks) <= 100_000_000
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"report.html", "report.perfetto.json.gz", "report.runlog.json.gz"}


def test_the_example_runs_as_its_docstring_says(tmp_path: Path) -> None:
    """Each command in turn, with fewer steps and tokens where it takes their number."""
    text = (ROOT / "examples" / "train_trees.py").read_text()
    commands = re.findall(r"^    ((?:python|dynoffload) .*)$", text.split('"""')[1], re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        program, *words = shlex.split(command.replace("examples/", f"{ROOT}/examples/"))
        if program == "dynoffload":
            words = ["-m", program, *words]
        if any(word.endswith(".py") for word in words):
            words = ["5" if word.isdecimal() else word for word in words]
            words += ["--steps", "5"]
        run(*words, cwd=tmp_path)
    assert (tmp_path / "trees.pilot").exists()


def test_what_it_costs_is_what_was_measured() -> None:
    """The table's times and its commit are those of the result file."""
    result = json.loads((ROOT / "docs" / "results" / "paged.json").read_text("utf-8"))
    (measured,) = result["rows"]
    seconds = {"plain": measured["plain_s"]}
    seconds |= {name: way["seconds"] for name, way in measured["ways"].items()}
    text = (ROOT / "README.md").read_text("utf-8").partition("## What it costs")[2]
    rows = re.findall(r"^\| .* \| ([\d.]+) s \| ([\d.]+) \|$", text, re.MULTILINE)
    order = ("plain", "main", "in_backward", "repeat", "system")
    for (step, times), name in zip(rows, order, strict=True):
        assert step == f"{seconds[name]:.3g}"
        assert times == f"{seconds[name] / seconds['plain']:.3g}"
    assert f"Commit {result['made_by']['commit'][:7]}" in text
