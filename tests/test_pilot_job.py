"""`pilot train` as a job: on a cluster, the same bytes by any processes, no worker left behind."""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import joblib
import psutil
import pytest
from synthetic_pilot import label_of
from typer.testing import CliRunner

from dynoffload.cli import app
from dynoffload.datasets.trees import trees
from dynoffload.errors import ConfigError, TraceError
from dynoffload.experiments import zoo
from dynoffload.pilot import fit
from dynoffload.pilot.labels import FEW, encode_example, label_traces, make_label
from dynoffload.pilot.train import train_pilot
from dynoffload.pilot.workers import run_tasks
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.profiler import load_trace, resolve, trace_files
from dynoffload.profiler.profiling import profile

COUNT = 40
assert COUNT > FEW  # else no worker would be started


def silent(doing: str, done: int | None = None, total: int | None = None) -> None:
    """Report to nobody."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a Tree-LSTM on real syntax trees."""
    folder = tmp_path_factory.mktemp("traces")
    model = zoo.build("tree", "tiny", embedding=8, hidden=8)
    drawn = [
        type("Batch", (), {"args": (tree,), "source": tree.source})()
        for tree in islice(trees(max_nodes=40, seed=0), COUNT)
    ]
    profile(model, drawn, out=folder, progress=False)
    return folder


@pytest.fixture
def copy(traces: Path, tmp_path: Path) -> Path:
    """The traces where a test may change them."""
    return Path(shutil.copytree(traces, tmp_path / "traces"))


@pytest.mark.parametrize("budget", [None, 20_000])
def test_labels_are_what_traces_give_in_order_of_step(traces: Path, budget: int | None) -> None:
    programs = [resolve(load_trace(path)) for path in trace_files(traces)]
    read = [label_of(program) for program in sorted(programs, key=lambda program: program.step)]
    made = label_traces(traces, 1, silent)
    vocabulary = build_vocabulary([label.calls for label in made], budget)
    assert vocabulary == build_vocabulary([label.calls for label in read], budget)
    for direct, label in zip(read, made, strict=True):
        one, other = (encode_example(vocabulary, each) for each in (direct, label))
        assert one.sample == other.sample
        assert (one.blocks, one.source, one.hints) == (other.blocks, other.source, other.hints)


def test_the_pilot_is_the_same_byte_for_byte_whoever_works_on_it(
    copy: Path, tmp_path: Path
) -> None:
    train_pilot(copy, progress=False, seed=5).pilot.save(tmp_path / "one")
    train_pilot(copy, progress=False, seed=5, jobs=2).pilot.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    # Steps keep their order, whatever their files are called and whenever a worker ends.
    names = [f"{number}.trace" for number in range(COUNT)]
    random.Random(0).shuffle(names)
    for path, name in zip(sorted(copy.iterdir()), names, strict=True):
        path.rename(copy / name)
    train_pilot(copy, progress=False, seed=5, jobs=2).pilot.save(tmp_path / "three")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "three").read_bytes()


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "dynoffload", "pilot", "train", *map(str, arguments)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_job_that_is_killed(
    copy: Path, tmp_path: Path, how: signal.Signals
) -> None:
    for path in sorted(copy.iterdir()):
        for again in range(3):
            shutil.copyfile(path, copy / f"{path.stem}-{again}.trace")
    command = _command(copy, "-o", tmp_path / "out.pilot", "--jobs", 2, "--model", "markov")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    children: list[psutil.Process] = []
    while len(children) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(0.5)  # labels are being made
    process.send_signal(how)
    process.wait()
    left = psutil.wait_procs(children, timeout=30)[1]
    assert not left, left


def test_a_worker_whose_first_task_begins_after_its_parent_has_gone_ends() -> None:
    program = """
import os, time
from dynoffload.pilot.workers import _numbered
parent = os.getpid()
if not os.fork():
    while os.getppid() == parent:
        time.sleep(0.01)
    print("began", flush=True)
    _numbered(parent, time.sleep, 0, 20)
    print("went on", flush=True)
os._exit(0)
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "began\n"


def test_workers_outlive_the_thread_that_asked_for_them() -> None:
    """A second run, at once, has the same processes."""
    found: list[dict[int, int]] = []

    def ask() -> None:
        found.append(dict(run_tasks(abs, ((-number,) for number in range(6)), 2)))

    for _ in range(2):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        time.sleep(0.05)
    assert found == [{number: number for number in range(6)}] * 2


def test_where_there_are_no_processes_below_work_is_done_here(tmp_path: Path) -> None:
    """As in a worker of `multiprocessing`, which may have no children."""
    program = """
import multiprocessing, sys
from dynoffload.pilot.workers import run_tasks
def work():
    print(sorted(run_tasks(abs, ((-n,) for n in range(4)), 2)))
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work, daemon=True)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
    script = tmp_path / "script.py"
    script.write_text(program, "utf-8")
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[(0, 0), (1, 1), (2, 2), (3, 3)]"


def test_broken_traces_are_named_and_counted(copy: Path) -> None:
    broken = sorted(copy.iterdir())[3:9]
    for path in broken:
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TraceError, match=rf"6 of {COUNT} traces.*and 3 more") as error:
        train_pilot(copy, progress=False)
    assert all((path.name in str(error.value)) == (path in broken[:3]) for path in broken)


class TestTheCard:
    """The model card beside the pilot."""

    def run(self, traces: Path, out: Path, *options: str) -> str:
        arguments = ["pilot", "train", str(traces), "-o", str(out), "--model", "markov", *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return out.with_name(f"{out.name}.card.md").read_text()

    def test_it_says_what_the_pilot_was_made_of(self, traces: Path, tmp_path: Path) -> None:
        card = self.run(traces, tmp_path / "a.pilot", "--jobs", "1", "--budget", "20kB")
        for part in (
            "SHA-256 of the set",
            f"{COUNT} traces of",
            "torch 2",
            "numpy 2",
            "repeat-last",
            "--model markov --seed 0 --budget 20kB",
            "samples are uncertain",
        ):
            assert part in card

    def test_only_its_line_of_times_differs_between_runs(
        self, traces: Path, tmp_path: Path
    ) -> None:
        cards = []
        for jobs in ("1", "2"):
            lines = self.run(traces, tmp_path / "a.pilot", "--jobs", jobs).splitlines()
            assert sum(line.startswith("- times:") for line in lines) == 1
            cards.append([line for line in lines if not line.startswith("- times:")])
        assert cards[0] == cards[1]

    def test_it_admits_that_the_last_order_is_as_good(self, traces: Path, tmp_path: Path) -> None:
        same = tmp_path / "same"
        same.mkdir()
        first = min(traces.iterdir())
        for number in range(8):
            shutil.copyfile(first, same / f"{number}.trace")
        card = self.run(same, tmp_path / "a.pilot", "--jobs", "1")
        assert "no better than repeating the last order" in card


def test_scores_on_what_a_pilot_was_trained_on_say_so(traces: Path, tmp_path: Path) -> None:
    """Whether all, some or none of the traces are those, whatever they are called now."""
    pilot, some, others = tmp_path / "a.pilot", tmp_path / "some", tmp_path / "others"
    trained = train_pilot(traces, model="markov", progress=False)
    trained.pilot.save(pilot)
    some.mkdir()
    for number, trace in enumerate(sorted(traces.glob("*.trace"))[::2]):
        shutil.copyfile(trace, some / f"step-{number:06}.trace")
    drawn = [
        type("Batch", (), {"args": (tree,), "source": tree.source})()
        for tree in islice(trees(max_nodes=40, seed=9), 6)
    ]
    profile(zoo.build("tree", "tiny", embedding=8, hidden=8), drawn, out=others, progress=False)

    def told(folder: Path) -> tuple[str, int]:
        words = ["pilot", "eval", str(pilot), str(folder), "--jobs", "1"]
        shown = CliRunner().invoke(app, words)
        assert shown.exit_code == 0, shown.output
        numbers = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        return " ".join(shown.stdout.split()), numbers["trained_on"]

    text, count = told(traces)
    assert count == trained.train_samples
    assert f"{count} of these {COUNT} samples were used to train this pilot" in text
    text, count = told(some)
    assert 0 < count <= COUNT // 2
    assert f"{count} of these {COUNT // 2} samples" in text
    text, count = told(others)
    assert count == 0
    assert "used to train" not in text


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Of a Dask cluster of two processes on this machine."""
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        distributed.LocalCluster(processes=True, **options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


def test_a_dask_cluster_computes_and_trains_the_same_pilot(
    traces: Path, tmp_path: Path, client: Any
) -> None:
    with joblib.parallel_config("dask", client=client):
        workers = dict(run_tasks(os.getpid, [()] * 8))
        train_pilot(traces, model="markov", progress=False).pilot.save(tmp_path / "far")
    assert os.getpid() not in workers.values()
    train_pilot(traces, model="markov", progress=False).pilot.save(tmp_path / "here")
    assert (tmp_path / "far").read_bytes() == (tmp_path / "here").read_bytes()


def test_a_trace_that_a_cluster_cannot_read_is_named(copy: Path, client: Any) -> None:
    victim = min(copy.iterdir())
    victim.write_bytes(b"PAR1 no trace PAR1")
    with (
        joblib.parallel_config("dask", client=client),
        pytest.raises(TraceError, match=victim.name),
    ):
        label_traces(copy, None, silent)


@pytest.mark.parametrize("jobs", [0, -2])
def test_no_processes_are_not_a_number_of_them(jobs: int) -> None:
    with pytest.raises(ConfigError, match="from 1 on"):
        list(run_tasks(abs, [(1,)], jobs))


def test_trial_fits_see_some_samples_and_the_pilot_errs_as_all_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_pilot.py")))
    vocabulary, examples = synthetic["routed"](120, noise=0.1)
    whole = fit.fit_pilot(vocabulary, examples, model="markov")
    monkeypatch.setattr(fit, "MAX_CHOOSING", 40)
    some = fit.fit_pilot(vocabulary, examples, model="markov", jobs=2)
    assert (whole.card["validation_samples"], some.card["validation_samples"]) == (120, 40)
    assert some.threshold == whole.threshold
    assert some.correction is not None
    assert whole.correction is not None
    assert (some.correction.factor == whole.correction.factor).all()
    assert (some.correction.blend == whole.correction.blend).all()


def test_what_is_larger_than_any_trace_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.trace"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    made = make_label(str(path))
    assert isinstance(made, str)
    assert "larger than" in made
