"""The user's own hooks on the optimizer's step see what they see without dynoffload.

They run around a step whose work is split and put off, and must find the parameters and gradients
they would find in plain PyTorch, in the same order, whenever they were registered.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dynoffload


def _network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 64, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("defer", ["auto", "never"])
def test_a_hook_registered_right_before_a_step_comes_before_it(defer: str) -> None:
    """After backward, in the first step and in a later one; removed, it is not called again."""
    plain, ours = _network(), copy.deepcopy(_network())
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    mine = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    found: dict[Any, list[tuple[int, int]]] = {theirs: [], mine: []}

    def halve(opt: Any, args: Any, kwargs: Any) -> None:
        parameters = [p for group in opt.param_groups for p in group["params"]]
        found[opt].append((len(parameters), len(found[opt])))
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses, handles = [], []
        for number in range(6):
            loss = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(number)))
            loss.square().mean().backward()
            if number in (0, 3):
                handles.append(optimizer.register_step_pre_hook(halve))
            if number == 4:
                handles.pop(0).remove()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.sum().item())
        return losses

    config = {"defer_updates": defer}
    with dynoffload.offload(ours, mine, budget=200_000, pilot=None, config=config):
        losses = run(ours, mine)
        assert "register_step_pre_hook" in vars(mine)
    assert "register_step_pre_hook" not in vars(mine)
    assert losses == run(plain, theirs)
    assert found[mine] == found[theirs]
    assert len(found[mine]) == 3 + 2 * 1 + 2
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_hook_that_raises_right_before_a_step_leaves_all_as_it_was() -> None:
    """Registered after backward; the groups are whole at once, and the next step is as plain."""
    plain, ours = _network(), copy.deepcopy(_network())
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    mine = torch.optim.AdamW(ours.parameters(), lr=1e-2)

    def refuse(opt: Any, args: Any, kwargs: Any) -> None:
        raise RuntimeError("not now")

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _train(model, optimizer, 2)
        model(torch.ones(8, 64)).square().mean().backward()
        handle = optimizer.register_step_pre_hook(refuse)
        with pytest.raises(RuntimeError, match="not now"):
            optimizer.step()
        handle.remove()
        with pytest.raises(TypeError):
            optimizer.step(speed=2)  # type: ignore[call-overload]
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
        optimizer.step()
        optimizer.zero_grad()
        _train(model, optimizer, 2)

    with dynoffload.offload(ours, mine, budget=200_000, pilot=None):
        run(ours, mine)
    run(plain, theirs)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
