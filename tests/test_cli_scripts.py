"""``run`` and ``profile``: a script runs as Python would run it, and ends as it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dynoffload import config
from dynoffload.cli import app
from dynoffload.config import Defaults
from dynoffload.planning.blocks import Vocabulary
from dynoffload.runtime.offload import _log_overruled
from dynoffload.telemetry import RunLog
from dynoffload.units import format_bytes, format_seconds

RUNNER = CliRunner(env={"COLUMNS": "200"})

REPORT = """
import json, os, sys
import dynoffload.config as config
found = config.defaults()
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path0": sys.path[0],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "budget": found.budget, "policy": found.policy,
    "pilot": found.pilot and str(found.pilot), "spill": found.spill_dir and str(found.spill_dir),
    "report": found.report and str(found.report),
    "profile": found.profile_dir and str(found.profile_dir), "steps": found.profile_steps,
}))
"""


def write(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_options_before_the_script_are_ours_and_after_it_the_scripts(tmp_path: Path) -> None:
    script = write(tmp_path, REPORT)
    pilot = write(tmp_path, "", "moe.pilot")
    options = ["--budget", "512MiB", "--policy", "repeat", "--spill-dir", "/var/tmp"]
    options += ["--pilot", str(pilot), "--report", "out/run.html"]
    words = ["--budget", "7", "-x", "--help", "--", "a b"]
    result = RUNNER.invoke(app, ["run", *options, str(script), *words])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["argv"] == [str(script), *words]
    assert found["name"] == "__main__"
    assert found["main"] is True
    assert found["file"] == str(script)
    assert found["budget"] == 512 * 1024**2
    assert found["policy"] == "repeat"
    assert (found["pilot"], found["spill"]) == (str(pilot), "/var/tmp")
    assert found["report"] == "out/run.html"


def test_nothing_of_a_run_stays_behind(tmp_path: Path) -> None:
    argv, path, main = sys.argv[:], sys.path[:], sys.modules["__main__"]
    script = write(tmp_path, "import sys; sys.argv.append('x'); sys.path.append('y'); 1 / 0")
    result = RUNNER.invoke(app, ["run", "--budget", "1GiB", str(script)])
    assert result.exit_code == 1
    assert config.defaults() == config.Defaults()
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, path, main)


@pytest.mark.parametrize("safe", ["", "1"])
def test_the_path_is_what_python_makes_it(tmp_path: Path, safe: str) -> None:
    """Compared with ``python script.py`` itself, through a link, with and without safe path."""
    real = tmp_path / "real"
    real.mkdir()
    write(real, "import sys, os; print(sys.path[0], sys.argv[0], os.getcwd())")
    link = tmp_path / "link.py"
    link.symlink_to(real / "train.py")
    environment = {**os.environ, "PYTHONSAFEPATH": safe}
    outputs = [
        subprocess.run(
            [sys.executable, *way, str(link)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        ).stdout
        for way in ([], ["-m", "dynoffload", "run", "--budget", "1MB"])
    ]
    assert outputs[0] == outputs[1]
    assert (str(real) in outputs[0]) is not bool(safe)


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("sys.exit()", 0), ("raise SystemExit(3)", 3)],
)
def test_a_scripts_exit_code_is_ours(tmp_path: Path, end: str, code: int) -> None:
    script = write(tmp_path, f"import sys; {end}")
    assert RUNNER.invoke(app, ["run", "--budget", "1MB", str(script)]).exit_code == code


def test_an_exception_shows_the_scripts_frames_alone(tmp_path: Path) -> None:
    script = write(tmp_path, "def f():\n    raise KeyError('lost')\n\nf()\n")
    ended = subprocess.run(
        [sys.executable, "-m", "dynoffload", "run", str(script)], capture_output=True, text=True
    )
    assert ended.returncode == 1
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ended.stderr == plain.stderr


def test_a_syntax_error_is_shown_without_our_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    result = RUNNER.invoke(app, ["run", str(write(tmp_path, "x = (\n"))])
    assert result.exit_code == 1
    assert "SyntaxError" in result.stderr
    assert "runpy" not in result.stderr


def test_an_interrupted_script_ends_as_shells_expect(tmp_path: Path) -> None:
    script = write(tmp_path, "raise KeyboardInterrupt")
    assert RUNNER.invoke(app, ["run", str(script)]).exit_code == 130


def test_our_error_is_one_line_that_names_the_place(tmp_path: Path) -> None:
    text = (
        "from dynoffload.errors import BudgetError\n\nraise BudgetError('need 2 GiB, [have] 1')\n"
    )
    script = write(tmp_path, text)
    result = RUNNER.invoke(app, ["run", str(script)])
    assert result.exit_code == 1
    assert result.stderr == f"error: need 2 GiB, [have] 1 ({script}:3)\n"
    debug = RUNNER.invoke(app, ["--debug", "run", str(script)])
    assert "Traceback" in debug.stderr
    assert debug.stderr.endswith(f"error: need 2 GiB, [have] 1 ({script}:3)\n")


def test_a_bad_budget_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    script = write(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    result = RUNNER.invoke(app, ["run", "--budget", "8 parsecs", str(script)])
    assert result.exit_code == 1
    assert "8 parsecs" in result.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "--bugdet", "1GiB", __file__],
        ["run", "--pilot", "nowhere.pilot", __file__],
        ["profile", __file__, "-o", "x"],
        ["profile", "-o", __file__, __file__],
        ["profile", "--steps", "0", "-o", "x", __file__],
        ["pilot", "train", "."],
        ["pilot", "train", ".", "-o", "x", "--model", "oracle"],
    ],
)
def test_misspelt_commands_end_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RUNNER.invoke(app, words).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_our_log_lines_are_shown_unless_the_script_logs(tmp_path: Path) -> None:
    log = "import logging\nlogging.getLogger('dynoffload.plan').info('12 blocks')\n"
    quiet = write(tmp_path, log, "quiet.py")
    loud = write(
        tmp_path, "import logging\nlogging.basicConfig(level=20, format='own %(message)s')\n" + log
    )
    errors = [
        subprocess.run(
            [sys.executable, "-m", "dynoffload", "run", str(script)], capture_output=True, text=True
        ).stderr
        for script in (quiet, loud)
    ]
    assert [lines.splitlines()[0] for lines in errors] == ["dynoffload: 12 blocks", "own 12 blocks"]
    assert [lines.count("12 blocks") for lines in errors] == [1, 1]


# -- what is said beside a script's own words ---------------------------------------------------

TRAIN = """
import sys, torch, dynoffload
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
with dynoffload.offload(model, optimizer, **eval(sys.argv[1])):
    for _ in range(int(sys.argv[2])):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_the_steps_took_is_summed_up_and_files_are_named(tmp_path: Path) -> None:
    script, page = write(tmp_path, TRAIN), tmp_path / "out" / "run.html"
    words = ["run", "--budget", "300KiB", "--report", str(page), str(script), "{}", "5"]
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    written = [page, page.with_suffix(".perfetto.json.gz"), page.with_suffix(".runlog.json.gz")]
    assert result.stderr.splitlines()[-3:] == [f"wrote {path}" for path in written]
    assert all(path.stat().st_size for path in written)
    line = next(line for line in result.stderr.splitlines() if "5 steps" in line)
    log = RunLog.load(written[2])
    assert format_seconds(median(step.seconds for step in log.steps[2:])) in line
    assert f"{format_bytes(max(step.peak_fast_bytes for step in log.steps))} of the budget" in line
    assert line.endswith("the budget of 300KiB")


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(0)"])
def test_a_script_that_offloads_nothing_is_told(tmp_path: Path, end: str) -> None:
    script = write(tmp_path, end)
    result = RUNNER.invoke(app, ["run", "--budget", "1MB", str(script)])
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert f"{script} ended without an offload() block" in line
    result = RUNNER.invoke(app, ["run", str(script)])
    assert result.exit_code == 2, "it asked for nothing, and nothing was done"
    assert f"{script} ended without an offload() block" in result.stderr


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(3)"])
def test_a_block_that_a_script_leaves_open_is_left(tmp_path: Path, end: str) -> None:
    lines = f"session = dynoffload.offload(nn.Linear(64, 64), budget='1MB').start()\n{end}"
    script = write(tmp_path, f"import dynoffload\nfrom torch import nn\n{lines}")
    result = RUNNER.invoke(app, ["run", str(script)])
    assert result.exit_code == (3 if end else 0), result.output
    assert "Linear ended before its first step was complete" in result.stderr


def test_options_that_the_script_overrules_are_named_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    script, page = write(tmp_path, TRAIN), tmp_path / "run.html"
    own = {
        "budget": 2 << 20,
        "spill_dir": ".",
        "pilot": None,
        "device": "cpu",
        "config": {"policy": "on-demand"},
    }
    options = f"--spill-dir /var/tmp --pilot {__file__} --device cuda --policy repeat"
    words = ["run", *options.split(), "--budget", "2MiB", "--report", str(page), str(script)]
    result = RUNNER.invoke(app, [*words, repr(own), "1"])
    assert result.exit_code == 0, result.output
    found = [message for message in caplog.messages if "counts, and" in message]
    for parts in (
        ("spill_dir='.'", "--spill-dir /var/tmp"),
        ("pilot=None", f"--pilot {__file__}"),
        ("device='cpu'", "--device cuda"),
        ("policy='on-demand'", "--policy repeat"),
    ):
        assert sum(all(part in message for part in parts) for message in found) == 1
    assert len(found) == 4, "the budget is the same in other words"
    assert RunLog.load(page.with_suffix(".runlog.json.gz")).policy == "on-demand"
    caplog.clear()
    RUNNER.invoke(app, ["run", "--budget", "1MiB", str(script), repr({"budget": "2MiB"}), "1"])
    assert "offload(budget=2MiB) counts, and --budget 1MiB" in caplog.text


@pytest.mark.parametrize(
    ("host_budget", "device", "option", "lines"),
    [
        ("8GiB", 0, "cuda:0", 0),
        (8 << 30, "cuda:1", "cuda", 0),
        ("4GiB", "cuda:0", "cuda:0", 1),
        ("8GiB", "cuda:1", "cuda:0", 1),
        ("8GiB", 0, "cpu", 1),
        ("8GiB", "cpu", "bogus", 1),
    ],
)
def test_the_same_in_other_words_is_not_overruled(
    caplog: pytest.LogCaptureFixture,
    host_budget: int | str,
    device: int | str,
    option: str,
    lines: int,
) -> None:
    """Without a GPU, no block can be entered that would ask."""
    given = Defaults(host_budget=8 << 30, device=option)
    _log_overruled(given, {"host_budget": host_budget, "device": device})
    assert len(caplog.messages) == lines


@pytest.mark.parametrize("given", ["dict", "dynoffload.OffloadConfig"])
def test_the_scripts_own_pilot_counts(tmp_path: Path, given: str) -> None:
    """Though it is the default, in whose place the command line puts its own."""
    script, page = write(tmp_path, TRAIN), tmp_path / "run.html"
    words = ["run", "--budget", "2MiB", "--policy", "repeat", "--report", str(page), str(script)]
    result = RUNNER.invoke(app, [*words, f"dict(config={given}(policy='pilot'))", "1"])
    assert result.exit_code == 0, result.output
    assert RunLog.load(page.with_suffix(".runlog.json.gz")).policy == "pilot"


def test_a_policy_that_the_script_leaves_open_is_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a pilot that it does not ask is named."""
    silent = SimpleNamespace(vocabulary=Vocabulary("", ()), check=lambda network: None)
    monkeypatch.setattr("dynoffload.pilot.pilot.Pilot.load", lambda path: silent)
    pilot, script, page = (
        write(tmp_path, "", "x.pilot"),
        write(tmp_path, TRAIN),
        tmp_path / "x.html",
    )
    words = ["run", "--budget", "2MiB", "--policy", "repeat", "--pilot", str(pilot)]
    given = "dict(config=dynoffload.OffloadConfig(slices=False))"
    result = RUNNER.invoke(app, [*words, "--report", str(page), str(script), given, "1"])
    assert result.exit_code == 0, result.output
    assert RunLog.load(page.with_suffix(".runlog.json.gz")).policy == "repeat"
    assert f"--pilot {pilot} is not used" in caplog.text


# -- profile ------------------------------------------------------------------------------------

RECORD = """
import sys
import dynoffload.config as config
from dynoffload.errors import ProfilingDone
found = config.defaults()
for step in range(int(sys.argv[1])):
    if step == found.profile_steps:
        raise ProfilingDone
    (found.profile_dir / f"step-{step}.trace").write_bytes(b"x" * 1000)
print("finished", sys.argv[1:])
"""
"""What the recorder does to a script, without a network: a trace per step, then the end."""


def test_profile_stops_the_script_after_the_steps(tmp_path: Path) -> None:
    """Traces that were there stay, and do not count."""
    script, out = write(tmp_path, RECORD), tmp_path / "traces"
    out.mkdir()
    (out / "old.trace").write_bytes(b"old")
    result = RUNNER.invoke(app, ["profile", "-o", str(out), "--steps", "3", str(script), "100"])
    assert result.exit_code == 0, result.output
    assert "finished" not in result.stdout
    assert f"3 in {out}, beside 1 that were there" in result.stdout
    assert "pilot train" in result.stderr
    assert len(list(out.iterdir())) == 4
    assert config.defaults() == config.Defaults()


def test_a_script_that_records_nothing_is_an_error(tmp_path: Path) -> None:
    script = write(tmp_path, "print('no training here')")
    result = RUNNER.invoke(app, ["profile", "-o", str(tmp_path / "traces"), str(script)])
    assert result.exit_code == 1
    assert "dynoffload.offload(model, optimizer)" in result.stderr
    assert not (tmp_path / "traces").exists()
    (tmp_path / "own").mkdir()  # what was there stays
    RUNNER.invoke(app, ["profile", "-o", str(tmp_path / "own"), str(script)])
    assert (tmp_path / "own").is_dir()


def test_a_failing_script_keeps_its_code_and_its_traces(tmp_path: Path) -> None:
    script, out = write(tmp_path, RECORD + "sys.exit(5)"), tmp_path / "traces"
    result = RUNNER.invoke(app, ["profile", "-o", str(out), str(script), "2"])
    assert result.exit_code == 5
    assert len(list(out.iterdir())) == 2
