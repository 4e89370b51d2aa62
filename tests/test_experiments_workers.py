"""Workers say the same losses whatever their memory, and do not die in silence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dynoffload.experiments.ways import BUDGETED, Spec
from dynoffload.experiments.workers import (
    WorkerError,
    losses_equal,
    worker,
)

TINY = Spec("moe", "tiny", shape={"length": 16}, spill_dir="/var/tmp")


def test_equal_means_something() -> None:
    def with_losses(losses: list[str]) -> Any:
        return SimpleNamespace(name="x", losses=losses)

    assert losses_equal(with_losses(["a", "b"]), with_losses(["a", "b", "c"]))
    assert not losses_equal(with_losses(["a", "b"]), with_losses(["a", "c"]))
    with pytest.raises(ValueError, match="no step in common"):
        losses_equal(with_losses([]), with_losses(["a"]))


def test_built_on_meta_under_a_budget_the_losses_are_those_of_plain_training() -> None:
    budgeted = replace(TINY, mode=BUDGETED, budget=400_000, meta=True)
    with worker("plain", TINY) as plain, worker("ours", budgeted) as ours:
        described = plain.step(measured=False, do="describe")
        ours.step(measured=False)
        for _ in range(3):
            plain.step()
            ours.step()
        assert losses_equal(plain, ours)
        assert len(set(plain.losses)) == 4
        state = ours.ask("state")
    assert state["paging"]
    assert 0 < state["peak_fast_bytes"] <= 400_000
    assert all(step.stats["bytes_in"] > 0 for step in ours.measured)
    assert all(step.seconds >= step.forward_s > 0 for step in plain.measured)
    visited = [name for names, _ in described["visits"] for name in names]
    assert visited[0] == "embedding.weight"
    assert visited[-1] == "head.weight"
    assert sum(saved for _, saved in described["visits"]) > 0
    assert set(visited) <= set(described["parameters"])


def test_a_worker_that_cannot_start_says_why() -> None:
    with (
        pytest.raises(WorkerError, match="budget of 1000 B"),
        worker("small", replace(TINY, mode=BUDGETED, budget=1000)) as small,
    ):
        small.wait_ready()
