"""Hazard: parameters that do not train, always or for a while.

The graph: a frozen trunk under a head that trains; a frozen layer between trained ones, through
which gradients pass; layers frozen and thawed in mid-run, with gradients and updates of theirs
still waiting; a model without anything to train; one frozen by ``requires_grad_(False)`` alone and
one that is left out of the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from exactness import assert_same, is_paged
from hazards import (
    Mlp,
    Side,
    batch,
    compared,
    each_backend_in_time,
    each_of_the_cpu,
    each_paged,
    hazard,
    loss_of,
    stepwise,
    trained,
)
from torch import Tensor, nn
from torch.optim import AdamW

from dynoffload.errors import BudgetError

FROZEN = {"trunk": "layers", "middle": r"layers\.[12]", "biases": r".*bias"}


@each_backend_in_time
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("listed", [True, False], ids=["in the optimizer", "left out"])
def test_partly_frozen(backend: str, frozen: str, listed: bool) -> None:
    def make() -> nn.Module:
        model = Mlp()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not re.match(FROZEN[frozen], name))
        return model

    def optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:
        weights = [p for p in parameters if listed or p.requires_grad]
        return AdamW(weights, lr=1e-2, weight_decay=0.1)

    hazard(backend, trained(make, optimizer=optimizer))


@each_backend_in_time
def test_trained_but_not_in_the_optimizer(backend: str) -> None:
    """Its gradient is made, and grows, and nobody steps it."""
    hazard(backend, trained(optimizer=lambda parameters: AdamW(list(parameters)[:4], lr=1e-2)))


@compared(each_backend_in_time)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_frozen_and_thawed_in_mid_run(side: Side, set_to_none: bool) -> None:
    """Gradual unfreezing, and a layer frozen right after a step, whose update still waits."""
    model = Mlp()
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with side.offload(model, optimizer):
        for step in range(14):
            side.step(loss_of(model, step), optimizer, set_to_none=set_to_none)
            if step in (1, 2, 3):
                model.layers[3 - step].requires_grad_(True)
            if step == 4:
                model.layers[4].requires_grad_(False)


@stepwise(each_backend_in_time)
def test_frozen_between_backward_and_step(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """The step updates it all the same: it has a gradient."""
    loss_of(model, step).backward()
    model.layers[1].requires_grad_(False)
    optimizer.step()
    model.layers[1].requires_grad_(True)
    optimizer.zero_grad()


def through_numpy(target: Tensor, source: Tensor) -> None:
    target.detach().numpy()[1:] *= np.float32(0.5)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "average": lambda target, source: target.lerp_(source, 0.1),
    "data": lambda target, source: target.data.add_(0.25),
    "copied": lambda target, source: target.data.copy_(source.data),
    "one element": lambda target, source: target.data.view(-1)[-1:].mul_(-1.0),
    "of numpy": through_numpy,
}


@compared(each_of_the_cpu)
@pytest.mark.parametrize("write", WRITES)
def test_frozen_weights_and_buffers_that_are_written(side: Side, write: str) -> None:
    """As a teacher that follows the network is, at some steps, after many at which it was read."""
    model = Mlp()
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    model.register_buffer("seen", torch.ones(64, 64))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer):
        for step in range(9):
            side.step(loss_of(model, step) * model.seen.mean(), optimizer)
            if step % 4 == 3:
                with torch.no_grad():
                    for layer in model.layers[:2]:
                        WRITES[write](layer.weight, model.layers[4].weight)
                    WRITES[write](model.seen, model.layers[4].weight)


@each_paged
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_frozen_is_not_written_back(backend: str, trains: bool) -> None:
    """Neither in training steps nor in passes of evaluation."""
    model = Mlp(depth=12).requires_grad_(False)
    model.layers[6].requires_grad_(trains)
    optimizer = AdamW(model.layers[6].parameters(), lr=1e-2)
    side, written, read = Side(backend), [], []
    with side.offload(model, optimizer, share=0.4):
        assert side.paging is not None
        for step in range(6):
            with torch.set_grad_enabled(trains):
                loss = loss_of(model, step)
            if trains:
                side.step(loss, optimizer)
            counters = side.paging.device.counters()
            written.append(counters.bytes_out)
            read.append(counters.bytes_in)
    changed = 4 * 64 * 65 * 4 if trains else 0
    chunks = 12 * 8 * 64 * 4 * 4 if trains else 0
    assert read[-1] - read[1] > 4 * sum(p.nbytes for p in model.layers[:6].parameters())
    assert written[-1] - written[1] <= 4 * (changed + chunks)


@compared(each_backend_in_time, moves=False, aside=False)
def test_nothing_trains(side: Side) -> None:
    """A frozen model's forward, with grad mode on, with an input that has a gradient."""
    model = Mlp().requires_grad_(False)
    with side.offload(model, share=0.6):
        for step in range(6):
            x = batch(step, rows=4)[0].requires_grad_()
            model(x).square().sum().backward()
            side.see("slope", x.grad)


@each_paged
@pytest.mark.parametrize("second", [False, True], ids=["the first", "after another"])
def test_thawing_what_does_not_fit_is_refused_before_the_sample(backend: str, second: bool) -> None:
    """A frozen layer was counted without gradient and state; freezing it again is a way on. So it
    is of the second that is thawed, after one that fits."""
    model = nn.Sequential(
        nn.Linear(64, 256, bias=False),
        nn.ReLU(),
        nn.Linear(256, 64, bias=False),
        nn.Linear(64, 10),
    )
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model[3].weight.requires_grad_(not second)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    side = Side(backend)
    with side.offload(model, optimizer, share=0.0):
        for step in range(4):
            if step == 1:
                model[3].weight.requires_grad_(True)
            if step == 2:
                model[0].requires_grad_(True)
                before = {name: p.detach().clone() for name, p in model.named_parameters()}
                with pytest.raises(BudgetError, match=r"0\.weight, which was frozen before, needs"):
                    model(torch.ones(2, 64))
                assert_same(dict(model.named_parameters()), before, "the model")
                model[0].requires_grad_(False)
            side.step(model(torch.ones(2, 64)).square().mean(), optimizer)
    assert not torch.equal(model[3].bias, before["3.bias"])


def frozen_at_first() -> nn.Module:
    model = Mlp()
    for layer in list(model.layers)[:3]:
        layer.requires_grad_(False)
    return model


@stepwise(each_paged, frozen_at_first)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_thawed_is_paged(
    side: Side, model: Any, optimizer: Any, step: int, one_by_one: bool
) -> None:
    """From its first backward on, its gradient lies where all gradients do, and so does its
    state."""
    layers = list(model.layers)[:3]  # a slice of the ModuleList would be a module that is new
    thawed = [layer.requires_grad_(True) for layer in layers[: step if one_by_one else 5 * step]]
    loss_of(model, step).backward()
    assert [layer.weight.grad is not None for layer in layers].count(True) == len(thawed)
    sessions = [session for session, _ in side.sessions]
    for session in sessions:
        assert all(is_paged(session, layer.weight.grad) for layer in thawed)
    optimizer.step()
    optimizer.zero_grad()
    for session in sessions:
        states = [optimizer.state[layer.weight]["exp_avg"] for layer in thawed]
        assert all(is_paged(session, state) for state in states)
