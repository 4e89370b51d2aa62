"""Hazard: graphs that live longer than from one forward to its backward.

The graph: gradients of gradients (with ``create_graph``, and a Hessian's product with a vector); a
second backward without the graph; backwards in another order than their forwards;
``autograd.grad`` of some parameters; graphs that are dropped; a backward inside forward.
"""

from __future__ import annotations

import gc
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from exactness import HOME
from hazards import (
    Mlp,
    Side,
    batch,
    compared,
    each_backend_in_time,
    hazard,
    loss_of,
    stepwise,
    trained,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW


@stepwise(each_backend_in_time, steps=6)
def test_backward_twice_without_keeping_the_graph(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """The second raises, as in plain PyTorch, and the step goes on with the first."""
    loss = loss_of(model, step)
    loss.backward()
    side.fails("second", loss.backward)
    optimizer.step()
    optimizer.zero_grad()


@stepwise(
    each_backend_in_time,
    lambda: Mlp(depth=3),
    optimizer=partial(SGD, lr=1e-2),
    steps=6,
    share=0.5,
    states=0,
)
def test_backward_with_create_graph(side: Side, model: Any, optimizer: Any, step: int) -> None:
    loss = loss_of(model, step)
    loss.backward(create_graph=True)
    side.see("has a graph", model.head.weight.grad.requires_grad)
    penalty = sum(p.grad.square().sum() for p in model.parameters())
    optimizer.zero_grad()
    side.step(penalty, optimizer)


@stepwise(each_backend_in_time, lambda: Mlp(depth=3), steps=6, share=0.5, aside=False)
def test_product_of_hessian_and_vector(side: Side, model: Any, optimizer: Any, step: int) -> None:
    weights = list(model.parameters())
    loss = loss_of(model, step)
    first = torch.autograd.grad(loss, weights, create_graph=True)
    product = sum((g * g.detach().sign()).sum() for g in first)
    side.see("product", torch.autograd.grad(product, weights, retain_graph=True))
    side.step(loss, optimizer)


@stepwise(each_backend_in_time)
def test_backwards_in_the_order_of_their_forwards(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Not the reverse, which plans expect; and a third graph is dropped without one."""
    first, second, third = (loss_of(model, 10 * step + part) for part in range(3))
    first.backward()
    del third
    gc.collect()
    side.step(second, optimizer)
    side.see("losses", [first, second])


@stepwise(each_backend_in_time)
def test_gradients_of_some_parameters(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """``autograd.grad`` runs no accumulation; ``backward(inputs=...)`` for some only."""
    loss = loss_of(model, step)
    some = [model.layers[1].weight, model.head.weight]
    made = torch.autograd.grad(loss, some, retain_graph=True)
    side.see("made", made)
    loss.backward(inputs=[*some, model.layers[0].bias])
    optimizer.step()
    optimizer.zero_grad()


@compared(each_backend_in_time)
def test_a_graph_kept_over_steps(side: Side) -> None:
    """Truncated backpropagation through time: a state carries its graph over two steps; only the
    part before the last ``detach`` may be asked for after weights have changed."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.carry = nn.Linear(64, 64), nn.Linear(64, 64)
            self.out = nn.Linear(64, 10)

        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.inner(x) + self.carry(state))
            return self.out(state), state

    with side.block(Cell) as (model, optimizer):
        state = start = torch.zeros(8, 64, device=HOME)
        for step in range(6):
            x, y = batch(step)
            out, state = model(x, state)
            out2, state = model(x + 1, state)
            side.step(F.cross_entropy(out, y) + F.cross_entropy(out2, y), optimizer)
            state = state.detach()
        out, state = model(x, state)
        optimizer.zero_grad()
        loss_of(lambda x: model(x, start)[0], 1).backward()
        optimizer.step()
        side.fails("a graph that a step has overtaken", out.sum().backward)
        optimizer.zero_grad()


@each_backend_in_time
def test_a_backward_inside_forward(backend: str) -> None:
    """Forces from energies: forward asks autograd for the input's gradient."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = Mlp(classes=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.detach().requires_grad_()
            energy = self.energy(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
            return energy, -force

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        energy, force = model(batch(step)[0])
        side.step(energy.square() + force.square().mean(), optimizer)

    hazard(backend, trained(Forces, each))


@compared(each_backend_in_time)
def test_a_model_that_calls_itself(side: Side, backend: str) -> None:
    """Recursion over the managed root: inner calls are part of the outer sample, the whole of which
    is paged, also in the sample that begins with a change of the network."""

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            x = self(x, depth - 1) if depth else torch.tanh(x)
            x = torch.tanh(self.inner(x))
            return x if depth < 3 else self.out(x)

    model = Recursive()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer) as session:
        saved = [0]
        for step in range(5):
            if step == 2:
                model.unused = nn.Linear(64, 64)
            side.step(loss_of(model, step), optimizer)
            if session is not None and session._paging is not None:
                saved.append(session._paging.activations.saved_bytes)
        sizes = {after - before for before, after in pairwise(saved)}
        assert backend == "aside" or len(sizes) == (session is not None), sizes
