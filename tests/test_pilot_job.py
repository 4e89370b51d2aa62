"""`pilot train`: its scores, what a directory can lack, and the job with its workers."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

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
        for tree in islice(trees(max_nodes=32, seed=seed), count)
    ]
    profile(model, drawn, out=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def trained(traces: Path) -> TrainResult:
    return train_pilot(traces, progress=False, jobs=1)


@pytest.fixture(scope="module")
def moe_traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a small routed network at a few tokens per step, its weights at rest."""
    folder = tmp_path_factory.mktemp("moe")
    model = zoo.build("moe", "tiny", experts=16, width=8)
    profile(model, [Tokens(step) for step in range(48)], out=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def moe(moe_traces: Path) -> TrainResult:
    return train_pilot(moe_traces, progress=False, jobs=1)


def _saved(result: TrainResult, path: Path) -> bytes:
    result.pilot.save(path)
    return path.read_bytes()


def test_the_pilot_is_the_same_byte_for_byte_whoever_works_on_it(
    traces: Path, trained: TrainResult, tmp_path: Path
) -> None:
    """Steps keep their order, whatever their files are called and whenever a worker ends."""
    names = [f"{number}.trace" for number in range(COUNT)]
    random.Random(0).shuffle(names)
    for path, name in zip(sorted(traces.iterdir()), names, strict=True):
        shutil.copyfile(path, tmp_path / name)
    again = train_pilot(tmp_path, progress=False, jobs=2)
    assert _saved(again, tmp_path / "two") == _saved(trained, tmp_path / "one")


def test_workers_end_with_a_job_that_is_killed() -> None:
    code = """
import time
from dynoffload.pilot.workers import run_tasks
for _ in run_tasks(time.sleep, [(0,)] + 9 * [(60,)], 2):
    print("begun", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(children) >= 2
    left = psutil.wait_procs(children, timeout=20)[1]  # less than a task takes
    assert not left, left


def test_a_dask_cluster_computes_and_trains_the_same_pilot(
    traces: Path, trained: TrainResult, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        distributed.LocalCluster(processes=True, **options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        joblib.parallel_config("dask", client=client),
    ):
        workers = dict(run_tasks(os.getpid, [()] * 8))
        far = train_pilot(traces, progress=False)
    assert os.getpid() not in workers.values()
    assert _saved(far, tmp_path / "far") == _saved(trained, tmp_path / "here")


@pytest.mark.parametrize("jobs", [0, -2])
def test_no_processes_are_not_a_number_of_them(jobs: int) -> None:
    with pytest.raises(ConfigError, match="from 1 on"):
        list(run_tasks(abs, [(1,)], jobs))


def test_the_tree_lstm_is_predicted_on_files_held_out(trained: TrainResult) -> None:
    held_out = trained.evaluation
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


def test_scores_on_what_a_pilot_was_trained_on_say_so(
    traces: Path, trained: TrainResult, tmp_path: Path
) -> None:
    """Whether some or none of the traces are those, whatever they are called now."""
    pilot, some, others = tmp_path / "a.pilot", tmp_path / "some", tmp_path / "others"
    trained.pilot.save(pilot)
    some.mkdir()
    for number, trace in enumerate(sorted(traces.glob("*.trace"))[::4]):
        shutil.copyfile(trace, some / f"step-{number:06}.trace")
    recorded(others, 6, seed=9)

    def shown(*words: str) -> str:
        found = CliRunner().invoke(app, ["pilot", "eval", str(pilot), *words, "--jobs", "1"])
        assert found.exit_code == 0, found.output
        return " ".join(found.stdout.split())

    count = json.loads(shown(str(some), "--json"))["trained_on"]
    assert 0 < count <= COUNT // 4
    assert f"{count} of these {COUNT // 4} samples were used to train" in shown(str(some))
    assert "used to train" not in shown(str(others))


def test_a_saved_pilot_knows_its_network(
    moe: TrainResult, moe_traces: Path, trained: TrainResult, tmp_path: Path
) -> None:
    moe.pilot.save(tmp_path / "moe.pilot")
    pilot = Pilot.load(tmp_path / "moe.pilot")
    pilot.check(fingerprint(zoo.build("moe", "tiny", experts=16, width=8)))
    with pytest.raises(PilotError, match=r"trained for network.*Train a pilot"):
        pilot.check(fingerprint(zoo.build("moe", "tiny")))
    with pytest.raises(PilotError, match="trained for network"):
        evaluate_pilot(trained.pilot, moe_traces, progress=False)


def test_traces_that_cannot_be_learned_from_are_named(
    moe_traces: Path, traces: Path, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=r"holds no trace.*dynoffload profile"):
        train_pilot(tmp_path)
    with pytest.raises(TraceError, match="not a directory"):
        train_pilot(tmp_path / "missing")
    with pytest.raises(PilotError, match="share between 0 and 1"):
        train_pilot(moe_traces, holdout=1.0)
    good = sorted(traces.iterdir())
    for path in good[:3]:
        shutil.copy(path, tmp_path)
    with pytest.raises(PilotError, match="too few"):
        train_pilot(tmp_path, progress=False)
    other = shutil.copy(sorted(moe_traces.iterdir())[0], tmp_path / "x.trace")
    with pytest.raises(TraceError, match=r"trace is of network.*x\.trace.*own directory"):
        train_pilot(tmp_path, progress=False)
    Path(other).unlink()
    broken = [Path(shutil.copy(path, tmp_path)) for path in good[3:9]]
    for path in broken:
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TraceError, match=r"6 of 9 traces.*and 3 more") as error:
        train_pilot(tmp_path, progress=False)
    assert all((path.name in str(error.value)) == (path in broken[:3]) for path in broken)


def test_what_is_larger_than_any_trace_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.trace"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    made = make_label(str(path))
    assert isinstance(made, str)
    assert "larger than" in made
