"""`pilot train`: its scores, what a directory can lack, and the job with its workers."""

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
from types import SimpleNamespace
from typing import Any

import joblib
import psutil
import pytest
import torch
from typer.testing import CliRunner

from dynoffload.cli import app
from dynoffload.datasets.trees import trees
from dynoffload.errors import ConfigError, PilotError, TraceError
from dynoffload.experiments import zoo
from dynoffload.pilot.labels import FEW, make_label
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import TrainResult, evaluate_pilot, train_pilot
from dynoffload.pilot.workers import run_tasks
from dynoffload.profiler.network import fingerprint
from dynoffload.profiler.profiling import profile

COUNT = 40
assert COUNT > FEW  # else no worker would be started


class Tokens:
    """A batch of tokens from one of a few sources."""

    def __init__(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.args = (torch.randint(40, 60, (1, 6), generator=generator),) * 2
        self.source = "abcd"[step % 4]


def recorded(folder: Path, count: int = COUNT, seed: int = 0) -> Path:
    """Record a Tree-LSTM on some real syntax trees."""
    model = zoo.build("tree", "tiny", embedding=8, hidden=8)
    drawn = [
        SimpleNamespace(args=(tree,), source=tree.source)
        for tree in islice(trees(max_nodes=40, seed=seed), count)
    ]
    profile(model, drawn, out=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def moe_traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a small routed network at a few tokens per step, its weights at rest."""
    folder = tmp_path_factory.mktemp("moe")
    model = zoo.build("moe", "tiny", experts=16, width=8)
    profile(model, [Tokens(step) for step in range(48)], out=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def moe(moe_traces: Path) -> TrainResult:
    return train_pilot(moe_traces, progress=False)


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
    recorded(others, 6, seed=9)

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


def test_the_tree_lstm_is_predicted_on_files_held_out(traces: Path) -> None:
    result = train_pilot(traces, progress=False)
    held_out = result.evaluation
    assert held_out.pilot.block_order_accuracy >= 0.95
    assert held_out.last_order.block_order_accuracy < 0.8
    assert held_out.most_frequent.block_order_accuracy < 0.8


def test_the_moe_is_predicted_better_than_by_the_baselines(moe: TrainResult) -> None:
    found = moe.evaluation
    rows = {name: scores.block_order_accuracy for name, scores in found.rows().items()}
    assert rows["pilot"] > rows["last order"] + 0.03
    assert rows["pilot"] > rows["most frequent"] + 0.03
    assert found.pilot.varying_order > found.last_order.varying_order
    assert moe.train_samples + found.pilot.samples == 48


def test_the_saved_pilot_scores_the_same_and_knows_its_network(
    moe: TrainResult, moe_traces: Path, traces: Path, tmp_path: Path
) -> None:
    moe.pilot.save(tmp_path / "moe.pilot")
    pilot = Pilot.load(tmp_path / "moe.pilot")
    pilot.check(fingerprint(zoo.build("moe", "tiny", experts=16, width=8)))
    with pytest.raises(PilotError, match=r"trained for network.*Train a pilot"):
        pilot.check(fingerprint(zoo.build("moe", "tiny")))
    with pytest.raises(PilotError, match="trained for network"):
        evaluate_pilot(pilot, traces, progress=False)
    one = evaluate_pilot(pilot, moe_traces, progress=False)
    assert one.rows() == evaluate_pilot(moe.pilot, moe_traces, progress=False).rows()


def test_a_directory_without_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no trace.*dynoffload profile"):
        train_pilot(tmp_path)
    with pytest.raises(TraceError, match="not a directory"):
        train_pilot(tmp_path / "missing")


def test_mixed_networks_are_refused_with_both_files(
    moe_traces: Path, traces: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.trace").write_bytes(sorted(moe_traces.iterdir())[0].read_bytes())
    (tmp_path / "b.trace").write_bytes(sorted(traces.iterdir())[0].read_bytes())
    with pytest.raises(TraceError, match=r"a\.trace is of network.*b\.trace.*own directory"):
        train_pilot(tmp_path, progress=False)


def test_too_few_traces_and_impossible_shares_are_refused(moe_traces: Path, tmp_path: Path) -> None:
    for path in sorted(moe_traces.iterdir())[:3]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(PilotError, match="too few"):
        train_pilot(tmp_path, progress=False)
    with pytest.raises(PilotError, match="share between 0 and 1"):
        train_pilot(moe_traces, holdout=1.0)


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
