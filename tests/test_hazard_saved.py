"""Hazard: what autograd has saved is written before backward, or saved by hooks of the user.

The graph of writes: an operator that saves its input or output (``tanh``, ``mul``, ``linear``), and
then a write into that tensor, or into a view of it, or into the weight. Plain autograd notices by
the tensor's version and raises; saved-tensor hooks switch its check off, so ours must raise the
same error. Writes that autograd allows must go on giving the same gradients.

Of the user's hooks only the innermost pair runs. The graph: tanh layers, whose outputs are saved,
under hooks that quantize or copy what is saved (`save_on_cpu`); within a module's forward (theirs
run, not ours), around the model's call (ours run, and theirs for what is saved outside of it,
unless they are told of by forward), and around the whole block; and with hooks disabled by
`disable_saved_tensors_hooks`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hazards import (
    Mlp,
    Side,
    batch,
    compared,
    each_backend,
    each_backend_in_time,
    loss_of,
    stepwise,
)
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.optim import SGD


def written(how: str, x: Tensor, weight: Tensor) -> Tensor:
    """Return what a layer makes of ``x``, which writes into what autograd has saved."""
    a = F.linear(x, weight)
    match how:
        case "output of tanh":
            return torch.tanh(a).add_(1)
        case "view of an output":
            y = torch.tanh(a)
            y[:2].zero_()
            return y
        case "input of mul, without grad":
            b = a * a.sigmoid()
            with torch.no_grad():
                a.mul_(2)
            return b
        case "input of mul, in a list":
            b = a * a.sigmoid()
            with torch.no_grad():
                torch._foreach_mul_([a], 2.0)
            return b
        case "by out=":
            b = a.exp()
            with torch.no_grad():
                torch.add(a, 1, out=b)
            return a + b
        case "between two saves":
            a = torch.tanh(a)
            b = a * a
            a.relu_()
            return b + a * a
        case "allowed: before the save":
            return a.add_(1).relu_().mul(2).relu_()
        case "allowed: relu_":  # linear saves its input, relu_ its output, of different versions
            return F.linear(a.relu_(), weight)
    raise AssertionError(how)


FORWARDS = (
    *("output of tanh", "view of an output", "input of mul, without grad"),
    *("input of mul, in a list", "by out=", "between two saves"),
    *("allowed: before the save", "allowed: relu_"),
)


WARM = 4
"""Steps without such a write, after which paging is aside where all fits."""


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.how = "allowed: relu_"
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = written(self.how, x, weight)
        return x


@stepwise(
    each_backend_in_time,
    Writing,
    optimizer=partial(SGD, lr=1e-2),
    steps=7,
    states=0,
    moves=False,
)
@pytest.mark.parametrize("how", FORWARDS)
def test_a_write_into_what_is_saved(
    side: Side, model: Any, optimizer: Any, step: int, how: str
) -> None:
    x, _ = batch(step)
    model.how = how if step >= WARM else "allowed: relu_"
    loss = model(x).square().mean()
    error = side.fails("backward", loss.backward)
    if step >= WARM and not how.startswith("allowed"):
        assert "modified by an inplace operation" in str(error)
    optimizer.step()
    optimizer.zero_grad()
    side.see("loss", loss)


@compared(each_backend, moves=False)
@pytest.mark.parametrize("what", ["input", "weight", "output"])
def test_a_write_after_forward(side: Side, what: str) -> None:
    """Between forward and backward, from outside of the model."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Sigmoid())
    optimizer = SGD(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, states=0):
        for step in range(WARM):
            side.step(model(batch(step)[0]).sum(), optimizer)
        for step in range(3):
            x, _ = batch(step)
            y = model(x)
            with torch.no_grad():
                {"input": x, "weight": model[1].weight, "output": y}[what].mul_(0.5)
            side.fails("backward", y.sum().backward)
            optimizer.zero_grad()


@compared(each_backend, moves=False)
def test_a_step_between_forward_and_backward(side: Side) -> None:
    """The optimizer's step writes the weights in place: so an older graph raises."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = SGD(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, states=0):
        for step in range(WARM):
            side.step(model(batch(step)[0]).sum(), optimizer)
        for step in range(3):
            x, _ = batch(step)
            first, second = model(x).sum(), model(x + 1).sum()
            first.backward()
            optimizer.step()
            side.fails("backward", second.backward)
            optimizer.zero_grad()


# The user's hooks


class Rounding(saved_tensors_hooks):
    """Saves floating tensors in half precision, so that gradients tell whether it ran."""

    def __init__(self) -> None:
        def pack(tensor: Tensor) -> Tensor:
            return tensor.half() if tensor.is_floating_point() else tensor

        def unpack(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.is_floating_point() else tensor

        super().__init__(pack, unpack)


class Hooked(nn.Module):
    """Some of its layers run under hooks of their own."""

    def __init__(self, hooks: type[AbstractContextManager[None]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 10)
        self.hooks = hooks

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            with self.hooks() if index % 2 else nullcontext():
                x = x + torch.tanh(layer(x))
        return self.head(x)


@stepwise(each_backend, lambda hooks: Hooked(hooks))
@pytest.mark.parametrize("hooks", [Rounding, save_on_cpu])
def test_hooks_within_forward(side: Side, model: Any, optimizer: Any, step: int) -> None:
    side.step(loss_of(model, step), optimizer)


@compared(each_backend_in_time)
@pytest.mark.parametrize("hooks", [Rounding, save_on_cpu])
@pytest.mark.parametrize("where", ["call", "block"])
def test_hooks_around_the_model(
    side: Side, hooks: type[AbstractContextManager[None]], where: str
) -> None:
    """What changes what is saved must change the gradients here as it does there."""
    around = {where: hooks}
    with around.get("block", nullcontext)(), side.block() as (model, optimizer):
        for step in range(4):
            with around.get("call", nullcontext)():
                loss = loss_of(model, step)
            side.step(loss, optimizer)


@compared(each_backend)
@pytest.mark.parametrize("where", ["call", "inside"])
def test_hooks_disabled(side: Side, where: str) -> None:
    """Ours stay off where hooks are disabled. A forward that disables them refuses to run under
    any, so they must be turned off by ``page_activations=False``."""

    class Disabling(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with disable_saved_tensors_hooks("not here"):
                return super().forward(x)

    with side.block(
        lambda: Mlp() if where == "call" else Disabling(), page_activations=where == "call"
    ) as (model, optimizer):
        for step in range(4):
            with disable_saved_tensors_hooks("no") if where == "call" else nullcontext():
                loss = F.cross_entropy(model(batch(step)[0]), batch(step)[1])
            side.step(loss, optimizer)
