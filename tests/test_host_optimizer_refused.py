"""What an optimizer on the host refuses, and what it says."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from host_reference import Pair, odd, words
from torch import nn

from dynoffload.errors import BackendError, BudgetError, ConfigError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.host_optimizer.link import CpuLink


def test_options_that_make_no_sense() -> None:
    weights = [nn.Parameter(torch.zeros(3))]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kind": torch.optim.Adagrad}, "classes Adam, AdamW, SGD"),
        ({"foreach": True}, "foreach=True of AdamW cannot be chosen"),
        ({"tile_bytes": 16}, "is too small"),
        ({"threads": 0}, "threads=0"),
        ({"warmup_steps": 3}, "pass delayed=True"),
        ({"host_budget": "1MiB"}, "needs spill_dir="),
        ({"spil_dir": "/tmp"}, "unexpected keyword argument 'spil_dir'"),
        ({"device": "cdua"}, "'cdua' is no device"),
        ({"kind": torch.optim.AdamW(weights)}, "pass one of the classes"),
    ]
    for options, told in cases:
        kind = options.pop("kind", torch.optim.AdamW)
        with pytest.raises(ConfigError, match=told):
            HostOptimizer(weights, kind, **options)


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
        HostOptimizer([good, nn.Parameter(parameter)], torch.optim.AdamW)
    optimizer = HostOptimizer([good], torch.optim.AdamW)
    with pytest.raises(ConfigError, match=told):
        optimizer.add_param_group({"params": [nn.Parameter(parameter)]})
    assert len(optimizer.param_groups) == 1


def test_the_optimizer_that_was_made_last_takes_the_gradients() -> None:
    pair = Pair()
    first = pair.ours
    pair.train(words(2))
    pair.ours = HostOptimizer(pair.model.parameters(), torch.optim.AdamW, lr=1e-2, threads=1)
    pair.ours.load_state_dict(first.state_dict())
    pair.train(words(3, seed=1))
    pair.assert_same()
    with pytest.raises(ConfigError, match="another HostOptimizer was made over parameter 0 of"):
        first.step()
    first.close()
    pair.train(words(1, seed=2))
    pair.assert_same()


def test_an_optimizer_whose_gradients_have_left_is_refused() -> None:
    model = odd(torch.float32)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.out.weight.detach().clone()
    optimizer = HostOptimizer(model.parameters(), torch.optim.AdamW, threads=1)
    model(words(1)[0]).backward()
    with pytest.raises(ConfigError, match="this SGD would train nothing of parameter 0 of group 0"):
        plain.step()
    assert torch.equal(model.out.weight, before)
    optimizer.close()
    model(words(1)[0]).backward()
    plain.step()
    assert not torch.equal(model.out.weight, before)
    optimizer = HostOptimizer(model.parameters(), torch.optim.AdamW, threads=1)
    model(words(1)[0]).backward()
    del optimizer  # without close(): it is gone
    before = model.out.weight.detach().clone()
    plain.zero_grad()
    model(words(1)[0]).backward()
    plain.step()
    assert not torch.equal(model.out.weight, before)


def test_parameters_of_another_device() -> None:
    queues = mock.Mock(device=torch.device("cuda", 1))
    with pytest.raises(ConfigError, match="is on cpu, and the others on cuda:1"):
        HostOptimizer(odd().parameters(), torch.optim.AdamW, queues=queues)


def test_an_accelerator_that_parameters_come_to_later() -> None:
    optimizer = HostOptimizer(odd().parameters(), torch.optim.AdamW, device="cpu")
    assert optimizer.kind == "AdamW"
    if torch.accelerator.is_available():
        return
    with pytest.raises(BackendError, match="no accelerator"):
        HostOptimizer(odd().parameters(), torch.optim.AdamW, device="cuda")


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = HostOptimizer(model.parameters(), torch.optim.SGD)
    with pytest.raises(ConfigError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()
    optimizer.close()


def test_what_is_closed_or_copied() -> None:
    model = odd()
    optimizer = HostOptimizer(model.parameters(), torch.optim.AdamW)
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
    optimizer = HostOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    model(words(1)[0]).backward()
    with pytest.raises(ConfigError, match="no momentum_buffer"):
        optimizer.step()


def test_states_of_others() -> None:
    optimizer = HostOptimizer(odd().parameters(), torch.optim.AdamW)
    with pytest.raises(ConfigError, match="no state of an optimizer"):
        optimizer.load_state_dict({})
    other = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ConfigError, match="groups of"):
        optimizer.load_state_dict(other.state_dict())
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"exp_avg of parameter 0 of group 0 is \[3\]"):
        optimizer.load_state_dict(wrong)


def test_a_host_without_memory() -> None:
    model = odd()
    with mock.patch.object(CpuLink, "host", side_effect=MemoryError):
        with pytest.raises(BudgetError, match="for the gradients of 9 parameters: free memory"):
            HostOptimizer(model.parameters(), torch.optim.AdamW)
    model(words(1)[0]).backward()
    assert model.out.weight.grad is not None, "a hook is left"
