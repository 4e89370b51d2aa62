"""The experiment ``ranks``: bits, budgets, deaths, and a rank that fails."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from exactness import needs_pager

from dynoffload.experiments import ranks
from dynoffload.experiments.ranks_child import Task
from dynoffload.experiments.workers import WorkerError


@needs_pager
def test_ranks_train_to_the_same_bits_and_one_dies(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "ranks.json"
    result = ranks.run(path, ways=["ddp"], networks=["layerdrop"], steps=4, spill_dir=tmp_path)
    (trained,), (died,) = result["trainings"], result["deaths"]
    assert trained["exact"]
    assert trained["kept"]
    first, second = trained["ranks"]
    assert first["last_loss"] != second["last_loss"], "ranks have the same samples"
    assert first["plain"] != second["plain"], "ranks took the same paths"
    assert all(one["bytes_in"] > 0 for one in trained["ranks"])
    assert died["within"]
    assert "rank 1 is gone" in died["words"], died
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))


@needs_pager
def test_a_rank_that_fails_ends_the_others_at_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    task = Task(
        "ddp", "layerdrop", 0, 2, "", 6, 0.3, timeout_s=600.0, dies=2, spill_dir=str(tmp_path)
    )
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of layerdrop by ddp ended with code -9"):
        ranks._trained(task, patience=900.0)
    assert time.monotonic() - start < 300
