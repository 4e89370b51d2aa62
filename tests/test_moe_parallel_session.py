"""Experts over processes in a session of each rank, alone and beside data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exactness import needs_pager
from gloo_ranks import run_ranks
from parallel_sessions import compared, saved

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.moe.parallel import ExpertParallel


def test_a_policy_that_watches_one_process_is_refused() -> None:
    layer = ExpertParallel(8, 16, 4)
    layer.exchange.world = 2
    optimizer = torch.optim.SGD(layer.parameters())
    with (
        pytest.raises(ConfigError, match="policy='dtr' watches one process, and experts of this"),
        dynoffload.offload(layer, optimizer, budget="1GiB", config={"policy": "dtr"}),
    ):
        pass


@needs_pager
@pytest.mark.parametrize(("world", "width"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_each_ranks_session_changes_no_bit(world: int, width: int) -> None:
    found = run_ranks(compared, world, width)
    for one in found:
        assert one["same"]
        assert torch.equal(one["head"], found[0]["head"]), "replicas have gone apart"
    assert not torch.equal(found[0]["up"], found[1]["up"]), "ranks have the same experts"
    if world > width:
        assert torch.equal(found[0]["up"], found[width]["up"])


@needs_pager
@pytest.mark.parametrize(("pages", "replicated"), [(False, False), (True, False), (True, True)])
def test_each_ranks_experts_are_saved_apart(tmp_path: Path, pages: bool, replicated: bool) -> None:
    found = run_ranks(saved, 2, str(tmp_path), pages, replicated)
    for one in found:
        assert one["same"]
        assert not one["common"]
        assert len(one["refused"]) == 2
        assert all("ranks 0 and 1 name one directory" in said for said in one["refused"])
    assert not torch.equal(found[0]["up"], found[1]["up"]), "ranks have the same experts"
