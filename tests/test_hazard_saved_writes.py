"""Hazard: what autograd has saved is written in place before backward.

The graph: an operator that saves its input or output (``tanh``, ``mul``, ``linear``), and then a
write into that tensor, or into a view of it, or into the weight. Plain autograd notices by the
tensor's version and raises; saved-tensor hooks switch its check off, so ours must raise the same
error. Writes that autograd allows must go on giving the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hazards import Side, batch, compared, each_backend, each_backend_in_time, stepwise
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD


def _a_view_of_it(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.tanh(F.linear(x, weight))
    y[:2].zero_()
    return y


def _an_input_of_mul(x: Tensor, weight: Tensor) -> Tensor:
    a = F.linear(x, weight)
    b = a * a.sigmoid()
    with torch.no_grad():
        a.mul_(2)
    return b


def _by_a_list(x: Tensor, weight: Tensor) -> Tensor:
    a = F.linear(x, weight)
    b = a * a.sigmoid()
    with torch.no_grad():
        torch._foreach_mul_([a], 2.0)
    return b


def _by_out(x: Tensor, weight: Tensor) -> Tensor:
    a = F.linear(x, weight)
    b = a.exp()
    with torch.no_grad():
        torch.add(a, 1, out=b)
    return a + b


def _after_a_second_save(x: Tensor, weight: Tensor) -> Tensor:
    a = torch.tanh(F.linear(x, weight))
    b = a * a
    a.relu_()
    c = a * a
    return b + c


FORWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "output of tanh": lambda x, weight: torch.tanh(F.linear(x, weight)).add_(1),
    "view of an output": _a_view_of_it,
    "input of mul, without grad": _an_input_of_mul,
    "input of mul, in a list": _by_a_list,
    "by out=": _by_out,
    "between two saves": _after_a_second_save,
    "allowed: before the save": lambda x, weight: (
        F.linear(x, weight).add_(1).relu_().mul(2).relu_()
    ),
    # linear saves its input, relu_ its output: the two have different versions
    "allowed: relu_": lambda x, weight: F.linear(F.linear(x, weight).relu_(), weight),
}


WARM = 4
"""Steps without such a write, after which paging is aside where all fits."""


class Writing(nn.Module):
    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = forward
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = self.way(x, weight)
        return x


@stepwise(
    each_backend_in_time,
    lambda how: Writing(FORWARDS[how]),
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
    model.way = FORWARDS[how if step >= WARM else "allowed: relu_"]
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
