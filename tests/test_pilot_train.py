"""Training from a directory of real traces, and the errors a directory can give."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from dynoffload.datasets.trees import trees
from dynoffload.errors import PilotError, TraceError
from dynoffload.experiments import zoo
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import evaluate_pilot, train_pilot
from dynoffload.profiler.network import fingerprint
from dynoffload.profiler.profiling import profile

SOURCES = ("a.py", "b.py", "c.py", "d.py")


class Tokens:
    """A batch of tokens from one of a few sources, each with an alphabet of its own."""

    def __init__(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.args = (torch.randint(40, 60, (1, 6), generator=generator),) * 2
        self.source = SOURCES[step % len(SOURCES)]


def nodes(count: int) -> Iterator[object]:
    """The first trees that are small, as batches."""
    for tree in islice(trees(max_nodes=60, seed=0), count):
        yield type("Batch", (), {"args": (tree,), "source": tree.source})()


@pytest.fixture(scope="module")
def moe_traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a small routed network at a few tokens per step, its weights at rest."""
    folder = tmp_path_factory.mktemp("moe")
    model = zoo.build("moe", "tiny", experts=16, width=8)
    profile(model, [Tokens(step) for step in range(48)], out=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def tree_traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a small Tree-LSTM on real syntax trees."""
    folder = tmp_path_factory.mktemp("trees")
    model = zoo.build("tree", "tiny", embedding=8, hidden=8)
    profile(model, nodes(24), out=folder, progress=False)
    return folder


def test_the_tree_lstm_is_foretold_on_files_held_out(tree_traces: Path) -> None:
    result = train_pilot(tree_traces, progress=False)
    held_out = result.evaluation
    assert held_out.pilot.block_order_accuracy >= 0.95
    assert held_out.last_order.block_order_accuracy < 0.8
    assert held_out.most_frequent.block_order_accuracy < 0.8


def test_the_moe_is_foretold_better_than_by_the_baselines(moe_traces: Path) -> None:
    result = train_pilot(moe_traces, progress=False)
    rows = {name: s.block_order_accuracy for name, s in result.evaluation.rows().items()}
    assert rows["pilot"] > rows["last order"] + 0.03
    assert rows["pilot"] > rows["most frequent"] + 0.03
    assert result.evaluation.pilot.varying_order > result.evaluation.last_order.varying_order
    assert result.train_samples + result.evaluation.pilot.samples == 48


def test_the_saved_pilot_scores_the_same_and_knows_its_network(
    moe_traces: Path, tmp_path: Path
) -> None:
    result = train_pilot(moe_traces, progress=False)
    result.pilot.save(tmp_path / "moe.pilot")
    pilot = Pilot.load(tmp_path / "moe.pilot")
    pilot.check(fingerprint(zoo.build("moe", "tiny", experts=16, width=8)))
    with pytest.raises(PilotError, match="trained for network"):
        pilot.check(fingerprint(zoo.build("moe", "tiny")))
    one = evaluate_pilot(pilot, moe_traces, progress=False)
    other = evaluate_pilot(result.pilot, moe_traces, progress=False)
    assert one.rows() == other.rows()


def test_a_pilot_is_not_scored_on_another_network(moe_traces: Path, tree_traces: Path) -> None:
    pilot = train_pilot(tree_traces, progress=False).pilot
    with pytest.raises(PilotError, match="trained for network"):
        evaluate_pilot(pilot, moe_traces, progress=False)


def test_a_directory_without_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no trace.*dynoffload profile"):
        train_pilot(tmp_path)
    with pytest.raises(TraceError, match="not a directory"):
        train_pilot(tmp_path / "missing")


def test_mixed_networks_are_refused_with_both_files(
    moe_traces: Path, tree_traces: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.trace").write_bytes(sorted(moe_traces.iterdir())[0].read_bytes())
    (tmp_path / "b.trace").write_bytes(sorted(tree_traces.iterdir())[0].read_bytes())
    with pytest.raises(TraceError, match=r"a\.trace is of network.*b\.trace.*own directory"):
        train_pilot(tmp_path, progress=False)


def test_too_few_traces_and_impossible_shares_are_refused(moe_traces: Path, tmp_path: Path) -> None:
    for path in sorted(moe_traces.iterdir())[:3]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(PilotError, match="too few"):
        train_pilot(tmp_path, progress=False)
    with pytest.raises(PilotError, match="share between 0 and 1"):
        train_pilot(moe_traces, holdout=1.0)
