"""An optimizer on the host does, bit for bit, what the same lines of plain PyTorch do."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from emulated import emulated
from exactness import assert_same
from host_reference import KINDS, Pair, Reference, odd, on_accelerator, racing, words
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from dynoffload.host_optimizer import HostOptimizer
from dynoffload.host_optimizer.update_rule import UpdateRule
from dynoffload.host_optimizer.update_runner import StepUpdate, open_workers
from dynoffload.units import KiB, MiB

CASES: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in KINDS},
    "accumulated": {"accumulate": 3},
    "accumulated float16": {"accumulate": 3, "dtype": torch.float16},
    "accumulated float32": {"accumulate": 3, "dtype": torch.float32},
    "delayed": {"delayed": True},
    "delayed after two steps": {"delayed": True, "warmup_steps": 2},
    "delayed and accumulated": {
        "kind": "momentum",
        "delayed": True,
        "warmup_steps": 1,
        "accumulate": 2,
    },
    "in a file": {"kind": "amsgrad", "spills": True},
    "momentum in a file": {"kind": "momentum", "spills": True},
    "some in a file": {"spills": True, "host_budget": 40 * KiB},
    "delayed, some in a file": {"spills": True, "host_budget": 40 * KiB, "delayed": True},
}
LATE: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"delayed": True},
    "in a file": {"spills": True},
    "accumulated and clipped": {"accumulate": 2, "clip": 0.1},
}


def options_of(case: dict[str, Any], directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a `Pair` is made with and how it trains, of a case."""
    trains = {key: case[key] for key in ("accumulate", "clip") if key in case}
    made = {key: value for key, value in case.items() if key not in (*trains, "spills")}
    return {**made, **({"spill_dir": directory} if case.get("spills") else {})}, trains


@pytest.mark.parametrize("case", CASES)
def test_no_bit_differs(case: str, tmp_path: Path) -> None:
    """Tiles are of 1024 elements: the embedding and the hidden layer are cut, the others joined.
    Losses of every step are compared on the way, and the state in between where nothing is late."""
    made, trains = options_of(CASES[case], tmp_path)
    pair = Pair(**made)
    with mock.patch.object(os, "preadv", wraps=os.preadv) as read:
        for seed in range(2):
            pair.train(words(6, seed=seed), **trains)
            if not made.get("delayed"):
                pair.assert_same()
    assert read.called == ("spill_dir" in made)
    pair.finish()


@pytest.mark.parametrize("case", LATE)
def test_queues_that_are_late(case: str, tmp_path: Path) -> None:
    """Nothing is read too early or written too late, whatever copies take."""
    made, trains = options_of(LATE[case], tmp_path)
    with racing(1) as queues:
        pair = Pair("momentum", model=on_accelerator(odd(), queues), queues=queues, **made)
        pair.train(words(6), **trains)
        assert queues.copies > 0
        pair.finish()
        pair.ours.close()


def test_masters_are_float32_whatever_the_default_dtype() -> None:
    """As where a script builds a model in half precision by the default dtype."""
    model = odd()
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = HostOptimizer(model.parameters(), AdamW, threads=1, tile_bytes=4096, lr=1e-2)
        for sample in words(5):
            model(sample).backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    pair = Pair()
    pair.train(words(5))
    ours, expected = (one.state_dict()["state"] for one in (optimizer, pair.ours))
    assert_same(ours, expected, "state")


def test_tiles_may_be_of_any_size() -> None:
    """Also where threads divide a tile among them. 4112 bytes are no multiple of a slice's unit."""
    runs = []
    for tile_bytes, threads in ((MiB, 1), (20480, 2), (4112, 3)):
        model = odd()
        optimizer = HostOptimizer(model.parameters(), AdamW, tile_bytes=tile_bytes, threads=threads)
        for sample in words(3):
            model(sample).backward()
            optimizer.step()
        runs.append(optimizer.state_dict()["state"])
    assert_same(runs[1], runs[0], "tiles of 20 KiB")
    assert_same(runs[2], runs[0], "tiles of 4112 bytes")


@pytest.mark.parametrize("delayed", [False, True])
def test_updates_are_made_beside_other_work(delayed: bool) -> None:
    """The kernel of the second tile waits for the upload of the first; that of a delayed update
    waits for the next backward."""
    pair = Pair(delayed=delayed)
    pair.backward(words(1)[0])
    free, runs = threading.Event(), []
    plain_run, plain_upload = UpdateRule.run, StepUpdate.upload

    def run(self: UpdateRule, parts: Any) -> None:
        runs.append(parts)
        assert (not delayed and len(runs) < 2) or free.wait(30), "nothing goes on beside it"
        plain_run(self, parts)

    def upload(*args: Any) -> None:
        plain_upload(*args)
        free.set()

    with mock.patch.object(UpdateRule, "run", run), mock.patch.object(StepUpdate, "upload", upload):
        pair.ours.step()
        pair.theirs.step()
        if delayed:
            pair.backward(words(1)[0])
            free.set()
            pair.step()
        pair.finish()
    assert len(runs) > 2


def test_parameters_have_no_gradient_after_backward() -> None:
    model = odd()
    optimizer = HostOptimizer(model.parameters(), AdamW)
    model(words(1)[0]).backward()
    assert all(p.grad is None for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert_same([p.detach() for p in model.parameters()], before, "forgotten gradients")


def test_groups_and_schedulers() -> None:
    """Learning rates of groups change between steps, and a group comes later."""
    twins = []
    for make in (partial(HostOptimizer, tile_bytes=4096), Reference):
        model = odd()
        late = [*model.conv.parameters(), *model.embedding.parameters()]
        groups = [
            {"params": model.hidden.parameters(), "weight_decay": 0.3},
            {"params": model.out.parameters(), "lr": 0.5},
        ]
        optimizers: list[Any] = [make(groups, AdamW, lr=0.1)]
        scheduler = StepLR(optimizers[0], 1, gamma=0.5)
        for number, sample in enumerate(words(6)):
            if number == 3 and make is Reference:
                optimizers.append(Reference(late, AdamW, lr=0.01))
            elif number == 3:
                optimizers[0].add_param_group({"params": late, "lr": 0.01})
                scheduler.base_lrs.append(0.01)
            model(sample).backward()
            if number < 3:
                for parameter in late:
                    parameter.grad = None
            for optimizer in optimizers:
                optimizer.step()
            scheduler.step()
            if number >= 3:
                optimizers[-1].param_groups[-1]["lr"] = 0.01
        twins.append(model)
    assert_same(*(dict(model.named_parameters()) for model in twins), "parameters")


@pytest.mark.parametrize("delayed", [False, True])
def test_groups_that_come_later_get_a_file_too(delayed: bool, tmp_path: Path) -> None:
    """With tiles larger than any before, while an update may be under way."""
    states = []
    for where in (None, tmp_path):
        model = odd()
        options: dict[str, Any] = {"lr": 1e-2, "threads": 1, "tile_bytes": 64 * KiB}
        optimizer = HostOptimizer(
            model.out.parameters(), AdamW, delayed=delayed, spill_dir=where, **options
        )
        for number, sample in enumerate(words(5)):
            if number == 2:
                optimizer.add_param_group({"params": model.embedding.parameters()})
                model.embedding.zero_grad()
            model(sample).backward()
            optimizer.step()
        optimizer.finish()
        states.append(optimizer.state_dict()["state"])
    assert_same(states[1], states[0], "state")


def test_a_closure_is_called_once() -> None:
    pair = Pair()
    losses = []
    for model, optimizer in ((pair.model, pair.ours), (pair.reference, pair.theirs)):

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(words(1)[0])
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    assert_same(losses[0], losses[1], "losses")
    pair.assert_same()


def test_a_parameter_that_is_thawed_later() -> None:
    model = odd()
    model.hidden.requires_grad_(False)
    pair = Pair(model=model)
    pair.train(words(2))
    pair.model.hidden.requires_grad_(True)
    pair.reference.hidden.requires_grad_(True)
    pair.train(words(3, seed=1))
    pair.assert_same()


# States


@pytest.mark.parametrize("weights_first", [False, True])
@pytest.mark.parametrize(
    ("kind", "delayed"), [("amsgrad", False), ("momentum", False), ("adamw", True)]
)
def test_a_state_goes_on_in_a_file(
    kind: str, delayed: bool, weights_first: bool, tmp_path: Path
) -> None:
    """Saved in memory by torch.save, loaded into a file, with other tiles; weights and masters in
    any order. Parameters that lag behind their masters are saved so, and go on so."""
    pair = Pair(kind, delayed=delayed)
    pair.train(words(3))
    torch.save((pair.model.state_dict(), pair.ours.state_dict()), tmp_path / "saved.pt")
    weights, state = torch.load(tmp_path / "saved.pt")
    lags = {bool(one["lags"]) for one in state["state"].values() if float(one["step"])}
    assert lags == {delayed}
    pair.model = odd(seed=7)
    cls, options = KINDS[kind]
    pair.ours = HostOptimizer(
        pair.model.parameters(),
        cls,
        delayed=delayed,
        tile_bytes=20480,
        spill_dir=tmp_path,
        **{**options, "lr": 7.0},
    )
    if weights_first:
        pair.model.load_state_dict(weights)
    pair.ours.load_state_dict(state)
    if not weights_first:
        pair.model.load_state_dict(weights)
    pair.train(words(3, seed=1))
    pair.finish()


def test_the_state_of_torchs_own_optimizer() -> None:
    """In single precision, training goes on as it would have there."""
    model = odd(torch.float32)
    plain = copy.deepcopy(model)
    theirs = AdamW(plain.parameters(), lr=0.1, fused=True)
    ours = HostOptimizer(model.parameters(), AdamW, lr=0.1)
    sides: list[tuple[nn.Module, Any]] = [(plain, theirs)]
    for seed in range(2):
        for sample in words(2, seed=seed):
            for one, optimizer in sides:
                one(sample).backward()
                optimizer.step()
                optimizer.zero_grad()
        if not seed:
            model.load_state_dict(plain.state_dict())
            ours.load_state_dict(theirs.state_dict())
            sides.append((model, ours))
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()), "parameters")


def test_weights_that_are_written_reach_the_masters() -> None:
    model = odd()
    optimizer = HostOptimizer(model.parameters(), AdamW, lr=0.0)
    with torch.no_grad():
        model.out.bias.fill_(3.0)
    model(words(1)[0]).backward()
    optimizer.step()
    assert float(model.out.bias.detach()) == 3.0
    assert float(optimizer.state[model.out.bias]["master"]) == 3.0


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are a file's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(one, 16) for one in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return int(line.split()[4]) != 0
    return False


def test_what_is_beyond_the_host_budget_is_in_the_file(tmp_path: Path) -> None:
    pair = Pair(spill_dir=tmp_path, host_budget=40 * KiB)
    kept = [
        value
        for one in pair.ours.state.values()
        for key, value in one.items()
        if key not in ("step", "lags")
    ]
    assert 0 < sum(value.nbytes for value in kept if not is_mapped(value)) <= 40 * KiB


def test_staging_is_as_large_as_four_tiles(tmp_path: Path) -> None:
    """However much the file holds."""
    for width in (2000, 9000):
        with emulated() as queues:
            parameter = nn.Parameter(torch.zeros(width))
            optimizer = HostOptimizer(
                [parameter], AdamW, tile_bytes=4 * KiB, spill_dir=tmp_path, queues=queues
            )
            staging = queues.host_bytes - parameter.nbytes
            assert staging == pytest.approx(4 * 3 * 4 * KiB, abs=64)
            optimizer.close()


# The end


def test_a_forked_process_gives_nothing_back() -> None:
    """What is pinned is its parent's, and an accelerator answers to no forked process."""
    with emulated() as queues:
        pair = Pair(queues=queues)
        pair.train(words(2))
        held = queues.host_bytes
        child = os.fork()
        if not child:
            del pair.ours
            gc.collect()
            os._exit(int(queues.host_bytes != held))
        assert held > 0
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pair.train(words(2, seed=1))
        pair.assert_same()


@pytest.mark.parametrize("closes", [False, True])
def test_parameters_are_let_go_of_with_their_optimizer(closes: bool) -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = HostOptimizer([parameter], AdamW, threads=1)
    parameter.square().sum().backward()
    optimizer.step()
    if closes:
        optimizer.close()
    gone = weakref.ref(parameter)
    del parameter, optimizer
    gc.collect()
    assert gone() is None


# Threads, and what is logged


def test_workers_have_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the process and of other threads stay as they are."""
    before, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    pool = open_workers(torch.device("cpu"), threads=3)
    assert pool.submit(torch.get_num_threads).result() == 3
    assert torch.get_num_threads() == before
    pool.shutdown()
    for ranks, threads in ((1, cores), (cores, 1), (2 * cores, 1), ("many", cores)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert HostOptimizer(odd().parameters(), AdamW).threads == threads


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_logs_sizes(
    rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    parameter = nn.Parameter(torch.zeros(MiB, dtype=torch.bfloat16))
    with caplog.at_level(logging.INFO, "dynoffload"):
        HostOptimizer([parameter], AdamW, threads=2)
    assert ("12.00 MiB of masters and moments in memory and 0 B in a file" in caplog.text) != rank
