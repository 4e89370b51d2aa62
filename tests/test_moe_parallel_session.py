"""Experts over processes in a session of each rank, alone and beside data parallelism."""

from __future__ import annotations

import pytest
import torch
from exactness import needs_pager
from gloo_ranks import run_ranks
from parallel_sessions import compared


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
