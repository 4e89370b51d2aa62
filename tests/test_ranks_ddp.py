"""`DistributedDataParallel`: two processes train to the bits of the same run without a block.

What they run is in `ranks_worker`. What one process can show alone is shown here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from emulated import DEVICE, Emulated
from exactness import SMALL_PAGES, assert_same_training, footprint_of, needs_pager
from fused_networks import paging_of
from gloo_ranks import run_ranks
from ranks_worker import CASES, UNUSED, Dropped, all_layers, cases, saved
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dynoffload
from dynoffload.distributed.replicas import bucket_bytes, replicas_of
from dynoffload.errors import BudgetError, ConfigError
from dynoffload.runtime import target
from dynoffload.units import parse_bytes

GROUPS = {
    "loops": ["adamw", "static", "no-sync", "join"],
    "more loops": ["sgd", "hooked", "aside"],
    "paths": ["unused-clip", "unused-zeros", "small-buckets", "routed-clip"],
    "views": ["views", "views-unused", "mapped", "on-demand", "rollback"],
    "slices": ["fused", "fused-looks", "fused-zeros"],
}


def test_every_case_is_in_a_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(CASES)


@needs_pager
@pytest.mark.parametrize("group", GROUPS)
def test_two_processes_train_to_the_same_bits(group: str, tmp_path: Path) -> None:
    check(run_ranks(cases, 2, str(tmp_path), GROUPS[group], limit_s=240.0), tmp_path)


@pytest.mark.slow
@needs_pager
def test_three_processes_train_to_the_same_bits(tmp_path: Path) -> None:
    names = ["adamw", "unused-clip", "routed-clip", "views-unused", "fused-looks"]
    check(run_ranks(cases, 3, str(tmp_path), names, limit_s=240.0), tmp_path)


def check(answers: list[dict[str, Any]], directory: Path) -> None:
    """Check what each rank has found."""
    for rank, found in enumerate(answers):
        for name, answer in found.items():
            where = f"{name}, rank {rank}"
            assert not answer["differs"], f"{where}: {answer['differs']}"
            assert answer["peak"] <= answer["budget"], where
            assert answer["steps"] == CASES[name].steps_of(rank), where
            stays = rank in CASES[name].aside
            assert answer["pages"] != stays, where
            assert (answer["bytes_in"] > 0) != stays, f"{where}: nothing was paged"
        assert not list((directory / f"spill-{rank}").iterdir()), "a spill file is left"


# What one process can show


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for ``model``."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def on_host(model: nn.Module) -> torch.optim.Optimizer:
    """Return one with its state on the host."""
    return dynoffload.HostOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def options(model: nn.Module, share: float = 0.3, **config: Any) -> dict[str, Any]:
    """Return the arguments of a block that pages ``model``, its buckets beside it."""
    budget = bucket_bytes(replicas_of(model)) + int(share * footprint_of(model))
    return {"budget": budget, "config": {**SMALL_PAGES, "step_aside": False, **config}}


@pytest.mark.usefixtures("group")
def test_the_buckets_are_what_the_reducer_says_and_are_counted() -> None:
    ddp = DistributedDataParallel(Dropped())
    told = ddp._get_ddp_logging_data()["bucket_sizes"]
    buckets = sum(int(size) for size in str(told).split(","))
    assert bucket_bytes(replicas_of(ddp)) == buckets > 0
    optimizer = adamw(ddp)
    with dynoffload.offload(ddp, optimizer, **options(ddp)) as session:
        assert session.sizing.bucket_bytes == buckets
        assert session.sizing.pool_bytes + buckets < session.sizing.budget
        all_layers(ddp, 0, 0).backward()
        optimizer.step()
        assert session.stats["peak_fast_bytes"][0] > buckets


@pytest.mark.usefixtures("group")
def test_a_budget_that_cannot_hold_the_buckets_is_refused_and_the_named_one_is_enough() -> None:
    ddp = DistributedDataParallel(Dropped())
    optimizer = adamw(ddp)
    config = options(ddp)["config"]
    buckets = bucket_bytes(replicas_of(ddp))
    with pytest.raises(BudgetError, match=r"of DistributedDataParallel's buckets") as caught:
        with dynoffload.offload(ddp, optimizer, budget=buckets, config=config):
            pytest.fail("the block must not begin")
    named = re.search(r"at least ([0-9.]+ [KMG]?i?B)", str(caught.value))
    assert named
    assert caught.value.lacking == parse_bytes(named[1]) - buckets
    with dynoffload.offload(ddp, optimizer, budget=named[1], config=config):
        all_layers(ddp, 0, 0).backward()
        optimizer.step()


class Late(Dropped):
    """Registers a buffer in its first forward."""

    def forward(self, x: torch.Tensor, runs: list[bool]) -> torch.Tensor:
        """Return ``[rows, width]`` for the same."""
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(4096.0))
        return super().forward(x, runs) + self.table[:32]


@needs_pager
@pytest.mark.usefixtures("group")
def test_buffers_that_go_to_other_ranks_are_never_absent() -> None:
    """A single one is sent from where it lies, by threads that may not fault."""
    ddp = DistributedDataParallel(Late())
    optimizer = adamw(ddp)
    with dynoffload.offload(ddp, optimizer, **options(ddp)) as session:
        for step in range(3):
            all_layers(ddp, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        device = paging_of(session).device
        assert device.owner(ddp.module.layers[0][0].weight) >= 0
        assert device.owner(ddp.module.table) < 0


@pytest.mark.usefixtures("group")
def test_sparse_gradients_have_no_bucket() -> None:
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Linear(8, 8, bias=False))
    ddp = DistributedDataParallel(model)
    assert bucket_bytes(replicas_of(ddp)) == 8 * 8 * 4


@pytest.mark.usefixtures("group")
def test_a_replica_that_is_a_part_of_the_model() -> None:
    """A root of the user's around it: the buckets count."""
    torch.manual_seed(0)
    model, reference = nn.Sequential(Dropped()), nn.Sequential(Dropped())
    reference.load_state_dict(model.state_dict())
    optimizer, its = adamw(model), adamw(reference)
    outer = nn.Module()
    outer.net = DistributedDataParallel(model[0])

    def forward(x: torch.Tensor, runs: list[bool]) -> Any:
        return outer.net(x, runs)

    outer.forward = forward  # type: ignore[method-assign]
    with dynoffload.offload(outer, optimizer, **options(outer)) as session:
        for step in range(4):
            all_layers(outer, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.sizing.bucket_bytes > 0
        assert session.stats["bytes_in"].sum() > 0
    for step in range(4):
        all_layers(reference[0], step, 0).backward()
        its.step()
        its.zero_grad()
    assert_same_training(model, optimizer, reference, its)


@pytest.mark.usefixtures("group")
def test_a_checkpoint_has_the_names_of_the_model_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Dropped())
    optimizer = adamw(ddp)
    with dynoffload.offload(ddp, optimizer, **options(ddp)) as session:
        all_layers(ddp, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        session.save(tmp_path / "run")
        expected = {name: tensor.clone() for name, tensor in ddp.module.state_dict().items()}
    dynoffload.save_checkpoint(ddp, optimizer, tmp_path / "after")
    for run in ("run", "after"):
        plain = Dropped()
        dynoffload.load_checkpoint(plain, adamw(plain), tmp_path / run)
        for name, tensor in plain.state_dict().items():
            assert torch.equal(tensor, expected[name]), f"{run}: {name}"


@needs_pager
@pytest.mark.parametrize(("head_too", "pages"), [(True, False), (False, False), (False, True)])
def test_what_is_beside_a_replica_has_to_be_equal(
    tmp_path: Path, head_too: bool, pages: bool
) -> None:
    for found in run_ranks(saved, 2, str(tmp_path), head_too, pages):
        assert found["same"]
        differs = "parameter '1.weight' differs between ranks 0 and 1 of 2"
        assert (differs in found["refused"]) is not head_too


@pytest.mark.usefixtures("group")
def test_a_wrapper_of_which_nobody_was_told_is_refused() -> None:
    model = Dropped()
    ddp = DistributedDataParallel(model, **UNUSED)
    with dynoffload.offload(model, adamw(model), **options(ddp)):
        with pytest.raises(ConfigError, match="called by a DistributedDataParallel that offload"):
            all_layers(ddp, 0, 0)


@pytest.mark.usefixtures("group")
def test_a_model_that_another_replica_calls_is_none_of_it() -> None:
    """As a teacher is called by the forward of what it teaches."""
    teacher, student = Dropped(), Dropped()

    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = student

        def forward(self, x: torch.Tensor, runs: list[bool]) -> torch.Tensor:
            return (self.student(x, runs) - teacher(x, runs)) ** 2

    ddp = DistributedDataParallel(Taught())
    with dynoffload.offload(teacher, adamw(teacher), **options(teacher)) as session:
        all_layers(ddp, 0, 0).backward()
        assert session.paging
    assert all(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("place", "make", "words"),
    [
        (DEVICE, adamw, "nobody is told before the reducer writes a gradient"),
        ("cpu", on_host, "takes gradients before DistributedDataParallel"),
        ("meta", adamw, r"give it its weights first.*then wrap it"),
    ],
)
def test_what_is_not_served_is_refused(place: str, make: Any, words: str) -> None:
    with torch.device("meta" if place == "meta" else "cpu"):
        model = Dropped()
    ddp = DistributedDataParallel(model, init_sync=False)
    device = {"device": DEVICE} if place == DEVICE else {}
    with mock.patch.object(target, "open_streams", return_value=Emulated()):
        with pytest.raises(ConfigError, match=words):
            with dynoffload.offload(ddp, make(ddp), budget="1GiB", **device):
                pytest.fail("the block must not begin")
