"""`pilot train` as a job: on a cluster, the same bytes by any processes, no worker left behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import joblib
import psutil
import pytest
from typer.testing import CliRunner

from dynoffload.cli import app
from dynoffload.datasets.trees import trees
from dynoffload.errors import ConfigError, TraceError
from dynoffload.experiments import zoo
from dynoffload.pilot.labels import FEW, make_label
from dynoffload.pilot.train import train_pilot
from dynoffload.pilot.workers import run_tasks
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


def test_workers_end_with_a_job_that_is_killed(copy: Path, tmp_path: Path) -> None:
    for path in sorted(copy.iterdir()):
        for again in range(3):
            shutil.copyfile(path, copy / f"{path.stem}-{again}.trace")
    words = ["pilot", "train", str(copy), "-o", str(tmp_path / "out.pilot"), "--jobs", "2"]
    command = [sys.executable, "-m", "dynoffload", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    children: list[psutil.Process] = []
    while len(children) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(0.5)  # labels are being made
    process.kill()
    process.wait()
    left = psutil.wait_procs(children, timeout=120)[1]  # less than an idle worker's patience
    assert not left, left


def test_broken_traces_are_named_and_counted(copy: Path) -> None:
    broken = sorted(copy.iterdir())[3:9]
    for path in broken:
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TraceError, match=rf"6 of {COUNT} traces.*and 3 more") as error:
        train_pilot(copy, progress=False)
    assert all((path.name in str(error.value)) == (path in broken[:3]) for path in broken)


def test_scores_on_what_a_pilot_was_trained_on_say_so(traces: Path, tmp_path: Path) -> None:
    """Whether all, some or none of the traces are those, whatever they are called now."""
    pilot, some, others = tmp_path / "a.pilot", tmp_path / "some", tmp_path / "others"
    trained = train_pilot(traces, progress=False)
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
        train_pilot(traces, progress=False).pilot.save(tmp_path / "far")
    assert os.getpid() not in workers.values()
    train_pilot(traces, progress=False).pilot.save(tmp_path / "here")
    assert (tmp_path / "far").read_bytes() == (tmp_path / "here").read_bytes()


@pytest.mark.parametrize("jobs", [0, -2])
def test_no_processes_are_not_a_number_of_them(jobs: int) -> None:
    with pytest.raises(ConfigError, match="from 1 on"):
        list(run_tasks(abs, [(1,)], jobs))


def test_what_is_larger_than_any_trace_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.trace"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    made = make_label(str(path))
    assert isinstance(made, str)
    assert "larger than" in made
