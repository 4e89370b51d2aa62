"""Hazard: custom autograd Functions, which keep parameters in ways that no hook sees.

The graph: a linear layer written as a Function that saves its weight with ``save_for_backward``,
or puts it on ``ctx`` as an attribute (no saved-tensor hook runs), or saves a view, a clone, or
its own result; with a backward of its own that reads it, one that is differentiable, and one that
writes the gradient by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, footprint_of
from hazards import (
    Side,
    batch,
    compared,
    each_backend,
    each_backend_in_time,
    each_of_the_cpu,
    each_paged,
    stepwise,
)
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import dynoffload


class Saving(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Stashing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight, grad.t() @ ctx.x


class SavingViews(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, weight = inputs
        ctx.save_for_backward(x, weight.t(), output.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, turned, output = ctx.saved_tensors
        return grad @ turned.t() + 0 * output, grad.t() @ x


class Dirty(Function):
    """Works in place, marks it, and saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight.t()).tanh_()
        ctx.save_for_backward(x, weight, y)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if grad is None:
            return None, None
        x, weight, y = ctx.saved_tensors
        grad = grad * (1 - y * y)
        return grad @ weight, grad.t() @ x


class Direct(Function):
    """Accumulates the weight's gradient by hand and returns none for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            made = grad.t() @ x
            weight = ctx.weight
            weight.grad = made if weight.grad is None else weight.grad.add_(made)
        return grad @ weight.detach(), None


class Layers(nn.Module):
    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = self.function.apply(x, weight) + x
        return x


@stepwise(each_backend_in_time, Layers)
@pytest.mark.parametrize("function", [Saving, Stashing, SavingViews, Dirty, Direct])
def test_a_function_that_keeps_its_weight(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    side.step(model(batch(step)[0].requires_grad_()).square().mean(), optimizer)


@stepwise(each_backend, lambda: Layers(Stashing))
def test_a_stashed_weight_after_the_step(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """The first graph's backward comes after the step and reads the new weight, unchecked."""
    x, _ = batch(step)
    late = model(x).mean()
    side.step(model(x + 1).square().mean(), optimizer)
    late.backward()
    side.see("late", [p.grad for p in model.parameters()])


class Labelled(Tensor):
    """A tensor with an attribute of its own."""

    label: int


class Reading(Function):
    """Notes what backward gets."""

    seen: list[tuple[str, int | None]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labelled: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, labelled)
        return x @ weight.t() * labelled.as_subclass(Tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, labelled = ctx.saved_tensors
        Reading.seen.append((type(labelled).__name__, getattr(labelled, "label", None)))
        grad = grad * labelled.as_subclass(Tensor)
        return grad @ weight, grad.t() @ x, None


@compared(each_backend, budgeted=False)
@pytest.mark.parametrize("frozen", [False, True], ids=["an input", "a frozen parameter"])
def test_a_saved_tensor_of_a_subclass(side: Side, frozen: bool) -> None:
    """Backward gets it with its type and its attributes; it stays in memory, and is counted."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.scale = nn.Parameter(torch.rand(64, 64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                scale = self.scale[: len(x)] if frozen else torch.cos(x.detach())
                labelled = scale.as_subclass(Labelled)
                labelled.label = number
                x = Reading.apply(torch.tanh(x), layer.weight, labelled) + layer.bias
            return x

    Reading.seen = []
    with side.block(Net) as (model, optimizer):
        for step in range(6):
            loss = model(batch(step)[0]).square().mean()
            if side.paging is not None and not frozen:
                assert side.paging.activations.kept_bytes >= 4 * batch(step)[0].nbytes
            side.step(loss, optimizer)
    side.see("seen", Reading.seen)


class Jagged(nn.Module):
    """Attention over sequences of two lengths, as rows of one nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, len(rows)]))
        q, k, v = (
            layer(x).unflatten(-1, [2, 32]).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        found = F.scaled_dot_product_attention(q, k, v)
        return found.transpose(1, 2).flatten(-2).values()


class Strided(nn.Module):
    """The same layout as torch has had first, which has no sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, rows: Tensor) -> Tensor:
        x = torch.nested.nested_tensor([rows[:3], rows[3:]], layout=torch.strided)
        return self.b(F.gelu(self.a(x))).to_padded_tensor(0.0)


@stepwise(each_of_the_cpu, lambda kind: kind(), budgeted=False)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", [Jagged, Strided])
def test_nested_tensors(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """What autograd saves of them stays in memory, and is counted."""
    loss = model(batch(step)[0]).square().mean()
    if side.paging is not None:
        assert side.paging.activations.kept_bytes >= batch(step)[0].nbytes
    side.step(loss, optimizer)


class Fused(Function):
    """Adds the gradient of its weight into ``main_grad``, as fused kernels of Megatron's do."""

    holds = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight if Fused.holds else None
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        into = weight if ctx.weight is None else ctx.weight
        into.main_grad.addmm_(grad.t(), x)
        return grad @ weight, None


class FusedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.second.weight.main_grad = torch.zeros(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return Fused.apply(torch.tanh(self.first(x)), self.second.weight).sum()


@compared(each_of_the_cpu)
@pytest.mark.parametrize("holds", [True, False], ids=["held", "unpaged activations"])
def test_attributes_of_a_saved_parameter(
    side: Side, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there where the function holds the parameter itself, or nothing saved is paged."""
    monkeypatch.setattr(Fused, "holds", holds)
    with side.block(FusedNet, page_activations=holds) as (model, optimizer):
        weight = model.second.weight
        for step in range(6):
            model(batch(step)[0]).backward()
            weight.grad = weight.main_grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    side.see("main_grad", weight.main_grad)


@each_paged
def test_attributes_of_a_saved_parameter_are_lost_as_under_any_hooks(backend: str) -> None:
    """Torch makes another tensor of whatever such a hook gives back."""
    model = FusedNet()

    def same(tensor: Tensor) -> Tensor:
        return tensor

    for block in (
        torch.autograd.graph.saved_tensors_hooks(same, same),
        dynoffload.offload(
            model, budget=footprint_of(model), config={**SMALL_PAGES, "backend": backend}
        ),
    ):
        with block, pytest.raises(AttributeError, match="no attribute 'main_grad'"):
            model(batch(0)[0]).backward()
