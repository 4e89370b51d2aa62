"""Hazard: the user's own saved-tensor hooks, of which only the innermost pair runs.

The graph: tanh layers, whose outputs are saved, under hooks that count, quantize or copy what is
saved (`save_on_cpu`); within a module's forward (theirs run, not ours), around the model's call
(ours run, and theirs for what is saved outside of it, unless they are told of by forward), and
around the whole block; and with hooks disabled by `disable_saved_tensors_hooks`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
