"""The other commands: help, report, doctor, experiment, pilot; their output and exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from synthetic_runlog import synthetic_log
from typer.testing import CliRunner

from dynoffload import __version__, experiments
from dynoffload.cli import app
from dynoffload.cli.experiment import parser_of
from dynoffload.errors import ConfigError
from dynoffload.experiments import ablations
from dynoffload.experiments.harness import Experiment, Row, meanings_of, option, options_of
from dynoffload.memory.filesystems import MEMORY_FILESYSTEMS, mount_of
from dynoffload.pilot.evaluate import Scores
from dynoffload.pilot.train import Evaluation, TrainResult

RUNNER = CliRunner(env={"COLUMNS": "200"})


# -- the root -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["profile -o {} {}", "pilot train {1} -o {0}/p.pilot"])
def test_a_path_that_cannot_be_made_is_one_line(words: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    beside = script if words.startswith("profile") else tmp_path
    result = RUNNER.invoke(app, words.format("/proc/none", beside).split())
    assert result.exit_code == 1
    assert result.output == (
        "error: /proc/none: No such file or directory: check that path, or name another\n"
    )


def test_version() -> None:
    assert RUNNER.invoke(app, ["--version"]).stdout == f"dynoffload {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["profile"],
        ["run"],
        ["report"],
        ["doctor"],
        ["experiment"],
        ["export"],
        ["pilot", "train"],
        ["pilot", "eval"],
    ],
)
def test_every_help_shows_an_example(command: list[str]) -> None:
    result = RUNNER.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"$ dynoffload {' '.join(command)}" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dynoffload.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pandas', 'matplotlib', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[]"


# -- report -------------------------------------------------------------------------------------


def test_report_writes_page_and_trace_and_says_what_was(tmp_path: Path) -> None:
    """Beside the log, or where it is told to."""
    log = synthetic_log(5).save(tmp_path / "run.runlog.json.gz")
    assert RUNNER.invoke(app, ["report", str(log)]).exit_code == 0
    assert (tmp_path / "run.html").exists()
    page = tmp_path / "page.html"
    result = RUNNER.invoke(app, ["report", str(log), "-o", str(page)])
    assert result.exit_code == 0, result.output
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "page.perfetto.json.gz").exists()
    assert "MoELanguageModel, 5 steps: median step" in result.stdout
    assert "Order predicted" in result.stdout
    assert str(page) in result.stderr


def test_report_as_json_is_json_alone(tmp_path: Path) -> None:
    log = synthetic_log(6, policy="on-demand")
    path = log.save(tmp_path / "run.json")
    trace = tmp_path / "t.json"
    result = RUNNER.invoke(app, ["report", str(path), "--json", "--perfetto", str(trace)])
    numbers = json.loads(result.stdout)
    assert numbers["accuracy"] is None
    assert numbers["peak_fast_bytes"] == max(s.peak_fast_bytes for s in log.steps)
    assert numbers["perfetto"] == str(trace)
    assert json.loads(trace.read_text())["traceEvents"]
    assert "page" not in numbers
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "t.json"}


def test_report_of_what_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    result = RUNNER.invoke(app, ["report", str(path)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {path}: this is not a run log")
    assert result.stderr.count("\n") == 1
    assert RUNNER.invoke(app, ["report", str(tmp_path / "nowhere")]).exit_code == 2


# -- doctor -------------------------------------------------------------------------------------


def test_doctor_shows_bandwidth_and_a_verdict(tmp_path: Path) -> None:
    if mount_of(tmp_path)[0] in MEMORY_FILESYSTEMS:
        pytest.skip("the directory for temporary files is in memory")
    result = RUNNER.invoke(app, ["doctor", "--spill-dir", str(tmp_path), "--seconds", "0.05"])
    assert result.exit_code == 0, result.output
    for expected in ("GB/s", "O_DIRECT", "this process may take", "userfaultfd", "backend"):
        assert expected in result.stdout


def test_doctor_as_json_of_a_refused_directory(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    result = RUNNER.invoke(app, ["doctor", "--spill-dir", str(missing), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert found["tiers"] is None
    assert str(missing) in found["refusal"]
    assert found["system"]["memory_available"] > 0
    assert found["advice"]["backend"] in ("pager", "mapped")


# -- experiment ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fakes:
    steps: int = option(3, "of each run, again and again")
    rate: float | None = option(None, "some")
    fast: bool = option(False, "a switch")
    preset: str = option("tiny", "a name")
    budgets: tuple[int, ...] = option((), "numbers")


class Fake(Experiment[Fakes]):
    """Measures nothing."""

    parameters = Fakes

    def cases(self) -> Mapping[str, None]:
        return {"one": None}

    def run(self, case: None) -> Row:
        return {}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"fake": f"{__name__}:Fake"})
    monkeypatch.setattr(experiments, "summary", lambda name: f"What {name} measures.")


def test_experiments_are_listed(fake: None) -> None:
    result = RUNNER.invoke(app, ["experiment"])
    assert result.exit_code == 0
    assert "What fake measures." in result.stdout


def test_options_reach_the_experiment_by_type(fake: None, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fake.json"
    words = ["--steps", "5", "--rate=0.5", "--fast", "--preset", "base", "--budgets", "1,2"]
    result = RUNNER.invoke(app, ["experiment", "fake", "--json", str(path), *words])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    made_by = found.pop("made_by")
    assert made_by["machine"]["cores"] == os.cpu_count()
    assert made_by["command"].startswith("dynoffload")
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|\d+\.\d+\.\d+\S*", made_by["commit"])
    assert found["params"] == {
        "steps": 5,
        "rate": 0.5,
        "fast": True,
        "preset": "base",
        "budgets": [1, 2],
    }


def test_json_to_standard_output(fake: None) -> None:
    result = RUNNER.invoke(app, ["experiment", "fake", "--json", "-"])
    assert json.loads(result.stdout)["params"]["steps"] == 3


def test_an_experiments_options_are_listed(fake: None) -> None:
    text = RUNNER.invoke(app, ["experiment", "fake", "--options"]).stdout
    assert "--budgets" in text
    assert "tiny" in text
    assert "of each run" in text
    assert RUNNER.invoke(app, ["experiment", "fake", "--help"]).stdout == text
    assert "--options" in RUNNER.invoke(app, ["experiment", "--help"]).stdout
    of_all = RUNNER.invoke(app, ["experiment", "all", "--help"]).stdout
    assert "dynoffload experiment moe-pipeline --ranks 4" in of_all


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    fake: None, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "x.json"
    for path, told in ((below, "cannot be written"), (tmp_path, "directory")):
        result = RUNNER.invoke(app, ["experiment", "fake", "--json", str(path)])
        assert result.exit_code == 1
        assert told in result.stderr
        assert "--json" in result.stderr


def test_an_experiment_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    """``timeout`` and schedulers end a job by SIGTERM."""
    code = (
        "import tempfile, time\n"
        "from dynoffload import experiments\n"
        "from dynoffload.cli import app\n"
        "from dynoffload.experiments.harness import Experiment\n"
        "class Slow(Experiment):\n"
        "    def cases(self):\n"
        "        return {'one': None}\n"
        "    def run(self, case):\n"
        "        with tempfile.TemporaryDirectory():\n"
        "            print('ready', flush=True)\n"
        "            time.sleep(60)\n"
        "experiments.load = lambda name: Slow\n"
        "app(['experiment', 'slow'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir())
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--stepps", "5"], "unrecognized arguments: --stepps 5; --options"),
        (["--steps", "five"], "invalid int value: 'five'"),
        (["--steps"], "expected one argument"),
        (["--fast=maybe"], "'maybe'"),
        (["--budgets", "1,x"], "invalid list of int value: '1,x'"),
        (["loose"], "loose"),
    ],
)
def test_bad_options_are_named(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser_of("fake", Fakes).parse_args(words)
    assert named in str(caught.value)


def test_a_value_with_a_comma_stands_in_quotes() -> None:
    """Cases of `experiment overhead` have such names."""
    parser = parser_of("ablations", ablations.Params)
    given = parser.parse_args(["--only", 'small mixture, "base mixture, 1,024 tokens"'])
    assert given.only == ablations.Params().only
    assert '(small mixture, "base mixture, 1,024 tokens")' in " ".join(parser.format_help().split())


def test_an_unknown_experiment_is_named_with_those_there_are(fake: None) -> None:
    result = RUNNER.invoke(app, ["experiment", "fak"])
    assert result.exit_code == 1
    assert "no experiment is named 'fak': there are " in result.stderr


def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        experiments.write_json(tmp_path / "x.json", {"value": math.nan})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(experiments.EXPERIMENTS))
def test_every_registered_experiment_is_there_and_runs_by_its_name_alone(name: str) -> None:
    assert experiments.summary(name)
    params = experiments.load(name).parameters
    assert options_of(params).keys() == meanings_of(params).keys()  # raises without a default


# -- pilot --------------------------------------------------------------------------------------


def scores(order: float, rare: float = math.nan) -> Scores:
    return Scores(7, order, rare, 0.5)


@pytest.fixture
def evaluation() -> Evaluation:
    rows = (scores(0.95), scores(0.6, 0.8), scores(0.5))
    return Evaluation(*rows, one_ahead=0.9, latency_s=2e-4, slow_s=5e-4)


def test_training_shows_scores_and_saves_the_pilot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: Evaluation
) -> None:
    asked: dict[str, Any] = {}

    class Trained:
        def save(self, path: Path) -> None:
            path.write_text("pilot")

    def train(traces: Path, **options: Any) -> TrainResult:
        asked.update(options, traces=traces)
        return TrainResult(Trained(), evaluation, 30, 1.5)  # type: ignore[arg-type]

    monkeypatch.setattr("dynoffload.pilot.train.train_pilot", train)
    out = tmp_path / "deep" / "x.pilot"
    words = ["pilot", "train", str(tmp_path), "-o", str(out), "--seed", "3"]
    more = ["--budget", "1MiB", "--jobs", "2"]
    result = RUNNER.invoke(app, [*words, *more])
    assert result.exit_code == 0, result.output
    assert asked == {
        "traces": tmp_path,
        "seed": 3,
        "budget": 1024**2,
        "jobs": 2,
    }
    assert out.read_text() == "pilot"
    for expected in (
        "95.0%",
        "repeat-last",
        "one prediction takes 200 µs, one of twenty 500 µs; trained in 1.50 s",
    ):
        assert expected in result.stdout
    numbers = json.loads(RUNNER.invoke(app, [*words, "--json"]).stdout)
    assert (numbers["train_samples"], numbers["seconds"]) == (30, 1.5)
    assert numbers["pilot"]["block_order_accuracy"] == 0.95
    assert numbers["pilot"]["varying_order"] is None
    assert (numbers["last_order"]["varying_order"], numbers["slow_s"]) == (0.8, 5e-4)


def test_a_pilot_is_not_trained_from_nothing(tmp_path: Path) -> None:
    out = tmp_path / "x.pilot"
    result = RUNNER.invoke(app, ["pilot", "train", str(tmp_path), "-o", str(out)])
    assert result.exit_code == 1
    assert result.stderr.strip().startswith(f"error: {tmp_path}")
    assert "dynoffload profile" in result.stderr
    assert f"-o {tmp_path}" in result.stderr
    assert not out.exists()


def test_a_corrupt_pilot_is_one_clear_line(tmp_path: Path) -> None:
    pilot = tmp_path / "x.pilot"
    pilot.write_bytes(b"not a pilot")
    result = RUNNER.invoke(app, ["pilot", "eval", str(pilot), str(tmp_path)])
    assert result.exit_code == 1
    assert str(pilot) in result.stderr
    assert result.stderr.count("\n") == 1
