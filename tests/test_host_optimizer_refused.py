"""What an optimizer on the host refuses and what it says, and steps that are lost."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gloo_ranks import run_ranks
from host_reference import Pair, odd, step_of_replica, steps_of_replicas, words
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from dynoffload.errors import BackendError, BudgetError, ConfigError, SpillError, StepLostError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.host_optimizer.link import CpuLink
from dynoffload.host_optimizer.update_rule import UpdateRule
from dynoffload.host_optimizer.update_runner import StepUpdate

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"kind": Adagrad}, "classes Adam, AdamW, SGD"),
    ({"foreach": True}, "foreach=True of AdamW cannot be chosen"),
    ({"tile_bytes": 16}, "is too small"),
    ({"threads": 0}, "threads=0"),
    ({"warmup_steps": 3}, "pass delayed=True"),
    ({"host_budget": "1MiB"}, "needs spill_dir="),
    ({"spil_dir": "/tmp"}, "unexpected keyword argument 'spil_dir'"),
    ({"device": "cdua"}, "'cdua' is no device"),
    ({"kind": AdamW([nn.Parameter(torch.zeros(3))])}, "pass one of the classes"),
    ({"queues": mock.Mock(device=torch.device("cuda", 1))}, "on cpu, and the others on cuda:1"),
]


@pytest.mark.parametrize(("options", "told"), OPTIONS, ids=[told for _, told in OPTIONS])
def test_options_that_make_no_sense(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        HostOptimizer(odd().parameters(), **{"kind": AdamW, **options})


@pytest.mark.parametrize(
    ("parameter", "told"),
    [
        (torch.zeros(3, dtype=torch.float64), "is torch.float64"),
        (torch.zeros(3, dtype=torch.complex64), "is torch.complex64"),
        (torch.zeros(3, device="meta"), "on the meta device"),
        (torch.zeros(4, 4)[:, :2], "make it contiguous"),
    ],
)
def test_parameters_without_a_master(parameter: torch.Tensor, told: str) -> None:
    good = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match=told):
        HostOptimizer([good, nn.Parameter(parameter)], AdamW)
    optimizer = HostOptimizer([good], AdamW)
    with pytest.raises(ConfigError, match=told):
        optimizer.add_param_group({"params": [nn.Parameter(parameter)]})
    assert len(optimizer.param_groups) == 1


def test_the_optimizer_that_was_made_last_takes_the_gradients() -> None:
    pair = Pair()
    first = pair.ours
    pair.train(words(2))
    pair.ours = HostOptimizer(pair.model.parameters(), AdamW, lr=1e-2, threads=1)
    pair.ours.load_state_dict(first.state_dict())
    pair.train(words(3, seed=1))
    pair.assert_same()
    with pytest.raises(ConfigError, match="another HostOptimizer was made over parameter 0 of"):
        first.step()
    first.close()
    pair.train(words(1, seed=2))
    pair.assert_same()


@pytest.mark.parametrize("closes", [True, False])
def test_an_optimizer_whose_gradients_have_left_is_refused(closes: bool) -> None:
    """Until the one that takes them is closed, or gone."""
    model = odd(torch.float32)
    plain = SGD(model.parameters(), lr=0.1)
    before = model.out.weight.detach().clone()
    optimizer = HostOptimizer(model.parameters(), AdamW, threads=1)
    model(words(1)[0]).backward()
    with pytest.raises(ConfigError, match="this SGD would train nothing of parameter 0 of group 0"):
        plain.step()
    assert torch.equal(model.out.weight, before)
    if closes:
        optimizer.close()
    del optimizer
    plain.zero_grad()
    model(words(1)[0]).backward()
    plain.step()
    assert not torch.equal(model.out.weight, before)


@pytest.mark.parametrize("how", ["closed", "dropped", "loads"])
def test_gradients_that_are_lost_are_named(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """They left, and no step was made: `p.grad` does not have them either."""
    model = odd()
    optimizer = HostOptimizer(model.parameters(), AdamW, threads=1)
    saved = optimizer.state_dict()
    model(words(1)[0]).backward()
    assert model.out.weight.grad is None
    if how == "loads":
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
    elif how == "closed":
        optimizer.close()
    del optimizer
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "before step(): the gradients that it had taken, as of parameter" in caplog.text


@pytest.mark.parametrize("set_to_none", [True, False])
def test_nothing_is_said_of_gradients_that_were_used(
    set_to_none: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By a step, or discarded by `zero_grad`."""
    model = odd()
    with HostOptimizer(model.parameters(), AdamW, threads=1) as optimizer:
        model(words(1)[0]).backward()
        optimizer.step()
    with HostOptimizer(model.parameters(), AdamW, threads=1) as optimizer:
        model(words(1)[0]).backward()
        optimizer.zero_grad(set_to_none)
    assert not caplog.records


def test_an_accelerator_that_parameters_come_to_later() -> None:
    optimizer = HostOptimizer(odd().parameters(), AdamW, device="cpu")
    assert optimizer.kind == "AdamW"
    if torch.accelerator.is_available():
        return
    with pytest.raises(BackendError, match="no accelerator"):
        HostOptimizer(odd().parameters(), AdamW, device="cuda")


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = HostOptimizer(model.parameters(), SGD)
    with pytest.raises(ConfigError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()
    optimizer.close()


def test_what_is_closed_or_copied() -> None:
    model = odd()
    optimizer = HostOptimizer(model.parameters(), AdamW)
    with pytest.raises(ConfigError, match="not copied"):
        copy.deepcopy(optimizer)
    with optimizer:
        pass
    optimizer.close()
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(ConfigError, match="is closed"):
            use()
    model(words(1)[0]).backward()
    assert model.out.weight.grad is not None


def test_options_that_lack_their_state() -> None:
    model = odd()
    optimizer = HostOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    model(words(1)[0]).backward()
    with pytest.raises(ConfigError, match="no momentum_buffer"):
        optimizer.step()


def test_states_of_others() -> None:
    optimizer = HostOptimizer(odd().parameters(), AdamW)
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    for state, told in [
        ({}, "no state of an optimizer"),
        (AdamW([nn.Parameter(torch.zeros(3))]).state_dict(), "groups of"),
        (wrong, r"exp_avg of parameter 0 of group 0 is \[3\]"),
        (HostOptimizer(odd().parameters(), SGD).state_dict(), "of another optimizer"),
    ]:
        with pytest.raises(ConfigError, match=told):
            optimizer.load_state_dict(state)


def test_a_replica_in_a_plain_loop_is_refused() -> None:
    """Its gradients would leave before they are reduced, so the replicas would diverge. Backward
    says so before one leaves, whichever of the two is made first, and after a step without it."""
    for told in run_ranks(steps_of_replicas, 2, False):
        assert len(told) == 3
        assert all("before DistributedDataParallel has reduced those of" in one for one in told)
    assert run_ranks(steps_of_replicas, 2, True) == [["", "", ""]] * 2


def test_a_replica_of_one_process_trains() -> None:
    assert run_ranks(step_of_replica, 1, False) == [""]


# No room, and steps that are lost


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({}, BudgetError, "for the gradients of 9 parameters: free memory"),
        ({"spill_dir": "/nowhere/at/all"}, SpillError, "does not exist"),
    ],
)
def test_no_room(options: dict[str, Any], kind: type[Exception], told: str) -> None:
    model = odd()
    with mock.patch.object(CpuLink, "host", side_effect=MemoryError):
        with pytest.raises(kind, match=told):
            HostOptimizer(model.parameters(), AdamW, **options)
    model(words(1)[0]).backward()
    assert model.out.weight.grad is not None, "a hook is left"


@pytest.mark.parametrize("who", ["step", "state_dict", "finish", "close"])
def test_an_error_beside_the_next_step_reaches_whoever_comes(who: str) -> None:
    pair = Pair(delayed=True)
    pair.train(words(2))
    good = copy.deepcopy(pair.ours.state_dict())
    pair.backward(words(1)[0])
    with mock.patch.object(UpdateRule, "run", side_effect=MemoryError("no more")):
        pair.ours.step()
        with pytest.raises(StepLostError, match="no more"):
            getattr(pair.ours, who)()
    if who == "close":
        return
    assert_lost(pair, pair.ours.settle)
    pair.ours.load_state_dict(good)
    pair.model(words(1)[0]).backward()
    pair.ours.step()
    pair.ours.finish()


def assert_lost(pair: Pair, *uses: Callable[[], object]) -> None:
    """Assert that nothing goes on from a step that was cut off."""
    for use in (pair.ours.step, pair.ours.state_dict, *uses):
        with pytest.raises(StepLostError, match="was cut off"):
            use()


def failing(name: str, skip: int, how: str) -> Any:
    """Return a stand-in for a system call that fails from the ``skip``-th call on."""
    plain, calls = getattr(os, name), [0]

    def call(*args: Any) -> int:
        calls[0] += 1
        if calls[0] <= skip:
            return int(plain(*args))
        if how == "short":
            return 0
        raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))

    return mock.patch.object(os, name, call)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(
    ("name", "how", "skip"),
    [("preadv", "EIO", 0), ("preadv", "short", 5), ("pwritev", "ENOSPC", 5)],
)
def test_a_disk_that_fails_loses_the_step_and_says_so(
    name: str, how: str, skip: int, delayed: bool, tmp_path: Path
) -> None:
    pair = Pair(spill_dir=tmp_path, delayed=delayed)
    pair.train(words(2))
    weights = copy.deepcopy(pair.model.state_dict())
    state = copy.deepcopy(pair.ours.state_dict())
    pair.model(words(1)[0]).backward()

    def step() -> None:
        pair.ours.step()
        pair.ours.settle()  # waits for a delayed one

    with failing(name, skip, how), pytest.raises(StepLostError, match="cut off") as caught:
        step()
    assert isinstance(caught.value.__cause__, SpillError)
    assert str(tmp_path) in str(caught.value)
    assert_lost(pair, lambda: pair.ours.clip_grad_norm_(1.0))
    pair.model.load_state_dict(weights)
    pair.ours.load_state_dict(state)
    pair.train(words(2, seed=1))
    pair.finish()


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_upload_that_is_cut_off(error: type[BaseException], delayed: bool) -> None:
    """By Ctrl-C, or by an error: it is repeated, so the step is made as a whole."""
    pair = Pair(delayed=delayed)
    pair.train(words(2))
    pair.backward(words(1)[0])
    plain, calls = StepUpdate.upload, []

    def upload(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise error("no room")
        plain(*args)

    with mock.patch.object(StepUpdate, "upload", upload), pytest.raises(error, match="no room"):
        pair.ours.step()
    if delayed:
        pair.ours.step()  # it was the upload of the step before that was cut off
    pair.theirs.step()
    pair.train(words(2, seed=1))
    pair.finish()


def test_an_upload_that_fails_again_loses_the_step() -> None:
    pair = Pair()
    pair.backward(words(1)[0])
    with mock.patch.object(StepUpdate, "upload", side_effect=RuntimeError("no room")):
        with pytest.raises(StepLostError, match="no room"):
            pair.ours.step()
    with pytest.raises(StepLostError, match="was cut off"):
        pair.ours.step()
