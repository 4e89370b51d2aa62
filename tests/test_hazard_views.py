"""Hazard: what is kept of a parameter from call to call, and shows memory that the session moves.

The graph: a module that caches views of its own weight (transposed, sliced, chunked, detached,
``.data``, numpy) at its first call, inside the block or before it, and uses them at every later
one. In plain PyTorch a view shows each update; so it must here, on whichever thread that is made.
A view made *before* the block shows the old memory, so it is refused or stays true.
"""

from __future__ import annotations

from collections.abc import Callable
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
from torch.optim import SGD, AdamW

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda w: w.detach().t(),
    "data": lambda w: w.data,
    "sliced": lambda w: w.detach()[3:17, ::2],
    "chunked": lambda w: w.detach().chunk(4)[2],
    "unbound": lambda w: w.detach().unbind(0)[5],
    "flat": lambda w: w.detach().view(-1),
    "numpy": lambda w: w.detach().numpy(),
}


@compared(each_backend_in_time, aside=lambda when: when == "before")
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_view_shows_every_update(side: Side, backend: str, kind: str, when: str) -> None:
    if backend == "emulated" and kind == "numpy":
        pytest.skip("an accelerator's tensors are no arrays")
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    view = VIEWS[kind](model.layers[1].weight) if when == "before" else None
    with side.offload(model, optimizer):
        for step in range(6):
            side.step(loss_of(model, step), optimizer)
            if view is None:
                view = VIEWS[kind](model.layers[1].weight)
            side.see("view", torch.as_tensor(view))


class Caching(nn.Module):
    """Keeps the transposed weight of its first call, without a graph, and multiplies by it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = self.inner.weight.detach().t()
        return self.inner(x) + 0.1 * (x @ self.cached)


@stepwise(
    each_backend,
    lambda: nn.Sequential(*(Caching() for _ in range(4)), nn.Linear(64, 10)),
    aside=False,
)
def test_a_module_that_keeps_a_view_for_its_forward(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Backward needs the view too, and the update of the weight before the view is read."""
    side.step(loss_of(model, step), optimizer)


@compared(each_backend, aside=False)
def test_a_view_with_a_graph_kept_over_a_step(side: Side) -> None:
    """The view's graph is used again after the step: its ``t()`` still leads to the parameter."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=1e-1)
    with side.offload(model, optimizer, states=0):
        loss_of(model, 0).backward()
        view = model.layers[0].weight.t()
        for step in range(6):
            x, _ = batch(step)
            loss = (x @ view).square().mean() + loss_of(model, step)
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            side.see("loss", loss)


@compared(each_backend, aside=False)
def test_a_write_through_a_view(side: Side) -> None:
    """Writing into an old view writes the parameter, after the update that waits."""
    with side.block() as (model, optimizer):
        rows = model.layers[2].weight.detach()[:8]
        for step in range(6):
            side.step(loss_of(model, step), optimizer)
            rows.mul_(0.5)


@compared(each_backend_in_time, moves=False)
@pytest.mark.parametrize("kept", [False, True])
def test_flat_parameters(side: Side, kept: bool) -> None:
    """All weights are views of one buffer, as optimizers of flat parameters make them. One that
    the user keeps, and scales, stays in memory."""
    model = Mlp(depth=3)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    start = 0
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.data = flat[start:stop].view_as(parameter)
        start = stop
    if not kept:
        flat = torch.zeros(1)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, share=2.0) as session:
        for step in range(4):
            side.step(loss_of(model, step), optimizer)
            flat.mul_(0.9)
            if session is not None and kept:
                places = {p.untyped_storage().data_ptr() for p in model.parameters()}
                assert places == {flat.data_ptr()}
                assert session.log.steps[-1].peak_fast_bytes >= flat.nbytes


@stepwise(each_backend, steps=5, moves=False, budgeted=False)
def test_a_vector_of_parameters_and_back(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """All parameters become views of one vector, which keeps each other's memory."""
    side.step(loss_of(model, step), optimizer)
    vector = nn.utils.parameters_to_vector(model.parameters())
    side.see("norm", vector.norm())
    nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
