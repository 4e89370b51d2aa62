"""Experts over processes in a session of each rank, alone and beside data parallelism."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import needs_pager
from gloo_ranks import run_ranks
from parallel_sessions import UNLIKE, chosen, compared, dies, replicated, unlike, wrapped

from dynoffload.moe.parallel import ExpertParallel
from dynoffload.moe.parallel.choice import PLAIN


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
def test_a_choice_in_a_session_changes_no_bit_but_by_its_parts() -> None:
    one, other = run_ranks(chosen, 2)
    assert one == other
    assert one["same"]
    assert "train on one batch of that size before the block" in one["said"]


def test_experts_beside_replicas_have_the_gradients_of_one_process() -> None:
    for one in run_ranks(replicated, 2):
        assert "call dynoffload.moe.parallel.keep_apart(model) before it is wrapped" in one["said"]
        assert one["names"] == ["up", "down"]
        assert max(one["apart"].values()) < 1e-12, one["apart"]
        assert one["moved"], "the bias on the choice goes by the tokens of all ranks"
        assert len(one["norms"]) == 6
        assert max(map(abs, one["norms"])) < 1e-9, one["norms"]
        assert len(one["broken"]) == 2
        assert all("of the gradients of all ranks is nan" in said for said in one["broken"])


def test_ranks_that_cut_batches_otherwise_are_told() -> None:
    for rank, said in enumerate(run_ranks(unlike, 2)):
        for one, case in zip(said, UNLIKE, strict=True):
            parts, strategy, *memory = case[rank]
            assert f"layer 'a.moe' has parts={parts!r}, strategy={strategy!r}" in one
            assert (", memory=" in one) is bool(memory)
            assert f"on rank {rank}, and others on another rank: give all ranks the same" in one


def test_wrappers_that_would_mix_experts_or_wait_for_each_other_are_refused() -> None:
    for one in run_ranks(wrapped, 2):
        assert "whose order differs between ranks where they leave out other layers" in one["ddp"]
        assert one["own"] == ""
        assert "fully_shard has taken them for one tensor of all ranks" in one["fsdp"]
        assert one["left"] == ""


@needs_pager
def test_a_rank_that_dies_in_an_exchange_is_named() -> None:
    (said,) = run_ranks(dies, 2, only=(0,))
    assert said.startswith("RankError: rank 0 (step 3, ")
    assert "rank 1 is gone, its process " in said


@pytest.mark.parametrize(("parts", "strategy"), [(2, "S1"), ("auto", "auto")])
def test_a_copy_of_a_layer_chooses_anew(parts: Any, strategy: str, tmp_path: Path) -> None:
    layer = ExpertParallel(8, 16, 4, spill_dir=tmp_path, parts=parts, strategy=strategy)
    tokens = torch.randn(12, 8)
    layer(tokens).hidden.sum().backward()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.choice == (PLAIN if parts == "auto" else layer.choice)
        assert torch.equal(other(tokens).hidden, layer(tokens).hidden)
