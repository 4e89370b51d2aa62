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
from torch.optim.lr_scheduler import StepLR

from dynoffload.errors import StepLostError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.host_optimizer.update_rule import UpdateRule
from dynoffload.host_optimizer.update_runner import StepUpdate, open_workers
from dynoffload.units import MiB


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_reference(kind: str) -> None:
    """Tiles are of 1024 elements: the embedding and the hidden layer are cut, the others joined."""
    pair = Pair(kind)
    pair.train(words(5))
    pair.assert_same()


def test_masters_are_float32_whatever_the_default_dtype() -> None:
    """As where a script builds a model in half precision by the default dtype."""
    pair = Pair()
    for model in (pair.model, pair.reference):
        half = model is pair.model
        torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
        try:
            cls, values = KINDS["adamw"]
            optimizer: Any = pair.theirs
            if half:
                pair.ours.close()
                optimizer = pair.ours = HostOptimizer(
                    model.parameters(), cls, threads=1, tile_bytes=4096, **values
                )
            for sample in words(5):
                model(sample).backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_default_dtype(torch.float32)
    pair.assert_same()


@pytest.mark.parametrize("how", ["plain", "delayed", "in a file", "accumulated and clipped"])
def test_queues_that_are_late(how: str, tmp_path: Path) -> None:
    """Nothing is read too early or written too late, whatever copies take."""
    options: dict[str, Any] = {"delayed": how == "delayed"}
    if how == "in a file":
        options["spill_dir"] = tmp_path
    with racing(1) as queues:
        pair = Pair("momentum", model=on_accelerator(odd(), queues), queues=queues, **options)
        for number, sample in enumerate(words(6)):
            pair.backward(sample)
            if how == "accumulated and clipped":
                if number % 2 == 0:
                    continue
                pair.ours.clip_grad_norm_(0.1)
                nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1, foreach=False)
            pair.step()
            pair.zero_grad()
        assert queues.copies > 0
        pair.ours.finish()
        pair.theirs.catch_up()
        pair.assert_same()
        pair.ours.close()


def test_tiles_may_be_of_any_size() -> None:
    """Also where threads divide a tile among them. 4112 bytes are no multiple of a slice's unit."""
    runs = []
    for tile_bytes, threads in ((MiB, 1), (20480, 2), (4112, 3)):
        model = odd()
        optimizer = HostOptimizer(
            model.parameters(), torch.optim.AdamW, tile_bytes=tile_bytes, threads=threads
        )
        for sample in words(3):
            model(sample).backward()
            optimizer.step()
        runs.append(optimizer.state_dict()["state"])
    assert_same(runs[1], runs[0], "tiles of 20 KiB")
    assert_same(runs[2], runs[0], "tiles of 4112 bytes")


def test_a_finished_tile_is_uploaded_while_the_next_is_updated() -> None:
    """The kernel of the second tile waits for the upload of the first."""
    pair = Pair()
    pair.backward(words(1)[0])
    uploaded, runs = threading.Event(), []
    plain_run, plain_upload = UpdateRule.run, StepUpdate.upload

    def run(self: UpdateRule, parts: Any) -> None:
        runs.append(parts)
        assert len(runs) < 2 or uploaded.wait(30), "nothing is uploaded before all is updated"
        plain_run(self, parts)

    def upload(*args: Any) -> None:
        plain_upload(*args)
        uploaded.set()

    with mock.patch.object(UpdateRule, "run", run), mock.patch.object(StepUpdate, "upload", upload):
        pair.ours.step()
    assert len(runs) > 2
    pair.theirs.step()
    pair.assert_same()


def test_parameters_have_no_gradient_after_backward() -> None:
    model = odd()
    optimizer = HostOptimizer(model.parameters(), torch.optim.AdamW)
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
        optimizers: list[Any] = [make(groups, torch.optim.AdamW, lr=0.1)]
        scheduler = StepLR(optimizers[0], 1, gamma=0.5)
        for number, sample in enumerate(words(6)):
            if number == 3 and make is Reference:
                optimizers.append(Reference(late, torch.optim.AdamW, lr=0.01))
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


@pytest.mark.parametrize("kind", ["amsgrad", "momentum"])
def test_a_state_goes_on_in_a_file(kind: str, tmp_path: Path) -> None:
    """Saved in memory, loaded into a file, with other tiles; also through torch.save."""
    pair = Pair(kind)
    pair.train(words(3))
    torch.save(pair.ours.state_dict(), tmp_path / "state.pt")
    cls, options = KINDS[kind]
    pair.ours = HostOptimizer(
        pair.model.parameters(),
        cls,
        tile_bytes=20480,
        spill_dir=tmp_path,
        **{**options, "lr": 7.0},
    )
    pair.ours.load_state_dict(torch.load(tmp_path / "state.pt"))
    pair.train(words(3, seed=1))
    pair.assert_same()


def test_the_state_of_torchs_own_optimizer() -> None:
    """In single precision, training goes on as it would have there."""
    model = odd(torch.float32)
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    for sample in words(2):
        plain(sample).backward()
        theirs.step()
        theirs.zero_grad()
    model.load_state_dict(plain.state_dict())
    optimizer = HostOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    optimizer.load_state_dict(theirs.state_dict())
    for sample in words(2, seed=1):
        for one, its in ((model, optimizer), (plain, theirs)):
            one(sample).backward()
            its.step()
            its.zero_grad()
    for name, p in model.named_parameters():
        assert_same(p.detach(), dict(plain.named_parameters())[name].detach(), name)


def test_weights_that_are_loaded_reach_the_masters() -> None:
    """In whatever order weights and masters are loaded; what was not changed keeps its master."""
    pair = Pair()
    pair.train(words(2))
    weights = copy.deepcopy(pair.model.state_dict())
    state = copy.deepcopy(pair.ours.state_dict())
    pair.train(words(2, seed=1))
    for first_weights in (True, False):
        again = odd(seed=5)
        optimizer = HostOptimizer(again.parameters(), torch.optim.AdamW, lr=1e-2)
        if first_weights:
            again.load_state_dict(weights)
        optimizer.load_state_dict(state)
        if not first_weights:
            again.load_state_dict(weights)
        for sample in words(2, seed=1):
            again(sample).backward()
            optimizer.step()
        assert_same(optimizer.state_dict()["state"], pair.ours.state_dict()["state"], "state")
    with torch.no_grad():
        again.out.bias.fill_(3.0)
    again(words(1)[0]).backward()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert float(again.out.bias.detach()) == 3.0
    assert float(optimizer.state[again.out.bias]["master"]) == 3.0


def test_a_parameter_that_is_thawed_later() -> None:
    pair = Pair()
    pair.ours.close()
    pair.model.hidden.requires_grad_(False)
    pair.reference.hidden.requires_grad_(False)
    pair.ours = HostOptimizer(pair.model.parameters(), torch.optim.AdamW, lr=1e-2)
    pair.train(words(2))
    pair.model.hidden.requires_grad_(True)
    pair.reference.hidden.requires_grad_(True)
    pair.train(words(3, seed=1))
    pair.assert_same()


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


def test_ctrl_c_comes_after_the_step() -> None:
    """The step is made as a whole, and what was pressed is raised then."""
    pair = Pair()
    pair.train(words(2))
    pair.backward(words(1)[0])
    plain = StepUpdate.upload
    calls = []

    def upload(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        plain(*args)

    with mock.patch.object(StepUpdate, "upload", upload), pytest.raises(KeyboardInterrupt):
        pair.ours.step()
    pair.theirs.step()
    pair.train(words(2, seed=1))
    pair.assert_same()


@pytest.mark.parametrize("closes", [False, True])
def test_parameters_are_let_go_of_with_their_optimizer(closes: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = HostOptimizer([parameter], torch.optim.AdamW, threads=1)
    parameter.square().sum().backward()
    optimizer.step()
    if closes:
        optimizer.close()
    gone = weakref.ref(parameter)
    del parameter, optimizer
    gc.collect()
    assert gone() is None


def test_an_upload_that_fails_loses_the_step() -> None:
    pair = Pair()
    pair.backward(words(1)[0])
    with mock.patch.object(StepUpdate, "upload", side_effect=RuntimeError("no room")):
        with pytest.raises(StepLostError, match="no room"):
            pair.ours.step()
    with pytest.raises(StepLostError, match="cut off before"):
        pair.ours.step()


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
        assert HostOptimizer(odd().parameters(), torch.optim.AdamW).threads == threads


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_logs_sizes(
    rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    parameter = nn.Parameter(torch.zeros(MiB, dtype=torch.bfloat16))
    with caplog.at_level(logging.INFO, "dynoffload"):
        HostOptimizer([parameter], torch.optim.AdamW, threads=2)
    assert ("12.00 MiB of masters and moments in memory and 0 B in a file" in caplog.text) != rank
