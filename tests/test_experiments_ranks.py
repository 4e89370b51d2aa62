"""The experiment ``ranks``: bits, budgets, deaths, and a rank that fails."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from exactness import needs_pager

from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.processes import WorkerError, at_once
from dynoffload.experiments.ranks import Params, Ranks, Task
from dynoffload.experiments.ranks import carry_out as train


@needs_pager
def test_ranks_train_to_the_same_bits_and_one_dies(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trained, died = carry_out(Ranks, Params(("ddp",), ("layerdrop",), steps=4, spill_dir=tmp_path))[
        "rows"
    ]
    assert trained["exact"]
    assert trained["kept"]
    first, second = trained["ranks"]
    assert first["last_loss"] != second["last_loss"], "ranks have the same samples"
    assert first["plain"] != second["plain"], "ranks took the same paths"
    assert all(one["bytes_in"] > 0 for one in trained["ranks"])
    assert died["within"]
    assert "rank 1 is gone" in died["words"], died


@needs_pager
def test_a_rank_that_fails_ends_the_others_at_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    task = Task("ddp", "layerdrop", 2, 6, 0.3, 600.0, tmp_path, dies=2, store=f"{tmp_path}/store")
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"'rank 1 of two' was killed by signal 9"):
        at_once("two", train, [replace(task, rank=rank) for rank in range(2)], patience=900.0)
    assert time.monotonic() - start < 300
