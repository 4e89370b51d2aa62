"""Hazard: models that are run without their modules' own parameters, or transformed.

The graph: linear layers called by `functional_call` with their own parameters, with changed copies,
and stacked for an ensemble under ``vmap``; gradients by `torch.func.grad`, per sample and as
Jacobians, outside of the managed forward; ``torch.func.grad`` inside it, which torch refuses where
saved-tensor hooks are on.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hazards import Mlp, Side, batch, each_backend, loss_of, stepwise
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, stack_module_state, vmap
from torch.nn import functional as F
from torch.optim import SGD


@stepwise(each_backend)
def test_functional_call_with_its_own_parameters(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    named = dict(model.named_parameters())
    loss = loss_of(lambda x, named=named: functional_call(model, named, (x,)), step)
    side.step(loss, optimizer)


@stepwise(
    each_backend,
    lambda: Mlp(depth=3),
    steps=6,
    optimizer=partial(SGD, lr=1e-2),
    share=0.6,
    states=0,
)
def test_functional_call_one_step_ahead(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Meta-learning: a forward with parameters that one inner step has changed, and a backward
    through both."""
    named = dict(model.named_parameters())
    made = torch.autograd.grad(loss_of(model, step), list(named.values()), create_graph=True)
    ahead = {n: p - 0.1 * g for (n, p), g in zip(named.items(), made, strict=True)}
    loss = loss_of(lambda x, ahead=ahead: functional_call(model, ahead, (x,)), step)
    side.step(loss, optimizer)


@stepwise(each_backend, steps=6, share=0.6, moves=False, aside=False)
@pytest.mark.parametrize("detached", [True, False])
def test_gradients_by_transformation(
    side: Side, model: Any, optimizer: Any, step: int, detached: bool
) -> None:
    """`torch.func.grad` of the managed model, put into ``.grad`` by hand."""
    named = {n: p.detach() if detached else p for n, p in model.named_parameters()}
    x, y = batch(step)

    def loss(named: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
        return F.cross_entropy(functional_call(model, named, (x,)), y)

    made, value = grad_and_value(loss)(named)
    for name, parameter in model.named_parameters():
        parameter.grad = made.pop(name).detach()
    optimizer.step()
    optimizer.zero_grad()
    side.see("loss", value)


@stepwise(each_backend, lambda: Mlp(depth=3), steps=6, aside=False)
def test_gradients_per_sample(side: Side, model: Any, optimizer: Any, step: int) -> None:
    named = {n: p.detach() for n, p in model.named_parameters()}

    def loss(named: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, named, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(named, *batch(step, rows=3))
    side.see("norms", {n: g.flatten(1).norm(dim=1) for n, g in each.items()})
    side.step(loss_of(model, step), optimizer)


@stepwise(each_backend, lambda: Mlp(depth=3), steps=6)
def test_jacobians(side: Side, model: Any, optimizer: Any, step: int) -> None:
    x = batch(step, rows=1)[0][0]
    side.see("jacrev", jacrev(lambda x: model(x))(x))
    side.see("jvp", jvp(lambda x: model(x), (x,), (torch.ones_like(x),)))
    side.step(loss_of(model, step), optimizer)


@stepwise(each_backend, lambda: Mlp(depth=3), steps=6)
def test_an_ensemble_out_of_the_managed_model(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """`stack_module_state` copies the weights of the model and of a copy of it."""
    side.step(loss_of(model, step), optimizer)
    stacked = stack_module_state([model, copy.deepcopy(model)])
    skeleton = copy.deepcopy(model).to("meta")

    def call(weights: dict[str, Tensor], x: Tensor, skeleton: nn.Module = skeleton) -> Tensor:
        return functional_call(skeleton, weights, (x,))

    with torch.no_grad():
        x, _ = batch(step)
        side.see("ensemble", vmap(call, in_dims=(0, None))(stacked[0], x))


class Slopes(nn.Module):
    """A physics-informed network: its forward needs its own derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp(classes=1, depth=3)

    def forward(self, x: Tensor) -> Tensor:
        slope = vmap(grad(lambda row: self.inner(row).sum()))(x)
        return self.inner(x) + slope.square().sum(1, keepdim=True)


@stepwise(each_backend, Slopes, page_activations=False)
def test_a_transformation_inside_forward(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """With ``page_activations=False`` no hooks are on, and it works."""
    side.step(model(batch(step)[0]).square().mean(), optimizer)


@pytest.mark.parametrize("backend", ["mapped"])
def test_a_transformation_inside_forward_is_told_the_remedy(backend: str) -> None:
    """Torch's own error stays, with a note that says which option helps."""
    side = Side(backend)
    with side.block(Slopes) as (model, _optimizer):
        with pytest.raises(RuntimeError, match="saved tensor hooks") as raised:
            model(batch(0)[0])
        (note,) = raised.value.__notes__
        assert "config={'page_activations': False}" in note
        assert "which leaves it in memory" in note
