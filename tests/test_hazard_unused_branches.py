"""Hazard: parameters that get no gradient, in a step or ever.

The graph: heads of which one is trained at a time; a branch that is computed and never reaches the
loss; layers dropped at random (LayerDrop); a gate that no sample takes. A parameter without a
gradient must keep its bits *and its optimizer state*: moments do not decay, step counts do not
count, weight decay does not bite. With ``set_to_none=False`` a gradient of zeros is one, and they
do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hazards import (
    Mlp,
    Side,
    batch,
    each_backend,
    each_backend_in_time,
    loss_of,
    stepwise,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, AdamW, Optimizer


class Heads(nn.Module):
    """A trunk and four heads; a sample takes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, 64)
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.1),
    "momentum": partial(SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=1e-2, lr_decay=0.1),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@stepwise(
    each_backend_in_time,
    Heads,
    optimizer=lambda parameters, name: OPTIMIZERS[name](parameters),
    steps=7,
)
def test_one_head_at_a_time(
    side: Side, model: Any, optimizer: Any, step: int, name: str, set_to_none: bool
) -> None:
    out = model(batch(step)[0], [0, 1, 0, 0, 2, 1, 0][step])
    side.step(out.square().mean(), optimizer, set_to_none=set_to_none)


class Branching(nn.Module):
    """Saves activations that no backward asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.lost = Mlp(depth=2), Mlp(depth=3)
        self.score: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.score = self.lost(x).detach().mean()
        unused = self.lost(x * 2)
        return self.taken(x) + 0 * unused.detach()


@stepwise(each_backend, Branching, steps=5)
def test_a_branch_that_never_reaches_the_loss(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Its parameters get no gradient."""
    side.step(loss_of(model, step), optimizer)
    side.see("score", model.score)


class Dropping(Mlp):
    """Drops layers by numbers from the shared generator, whose state the session must not move."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.6:
                x = x + F.gelu(layer(x))
        return self.head(F.dropout(x, 0.1))


@stepwise(each_backend, Dropping, steps=8)
def test_layers_dropped_at_random(side: Side, model: Any, optimizer: Any, step: int) -> None:
    side.step(loss_of(model, step), optimizer)


@stepwise(each_backend, optimizer=partial(AdamW, lr=1e-2, weight_decay=0.1), steps=5)
def test_gradients_taken_away_before_the_step(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """``p.grad = None`` between backward and ``step()``: then that parameter does not move."""
    loss = loss_of(model, step)
    loss.backward()
    model.layers[step].weight.grad = None
    optimizer.step()
    optimizer.zero_grad()
    side.see("loss", loss)


@stepwise(each_backend)
def test_a_step_without_any_gradient(side: Side, model: Any, optimizer: Any, step: int) -> None:
    side.step(loss_of(model, step), optimizer)
    optimizer.step()
    optimizer.zero_grad()
