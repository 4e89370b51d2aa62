"""Hazard: the model's dtype, device or memory format set in mid-run.

The graph: linear layers converted by ``.to(torch.bfloat16)``, ``.half()`` and ``.double()`` while
updates wait, which gives each parameter other data of another size; ``.to("cpu")``, ``.cpu()`` and
``.to(dtype)`` that change nothing; single parameters converted; the process's default dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from exactness import HOME
from hazards import (
    Mlp,
    Side,
    batch,
    compared,
    each_backend,
    each_backend_in_time,
    each_paged,
    hazard,
    loss_of,
    stepwise,
    trained,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from dynoffload.errors import BudgetError, StepLostError

CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "a part": lambda model: model.head.double(),
    "nothing by device": lambda model: model.to(HOME),
    "nothing by cpu()": lambda model: model.cpu().to(HOME),
    "nothing by dtype": lambda model: model.float(),
    "type": lambda model: model.type(torch.float64),
}


class Casting(Mlp):
    """Takes any dtype of weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x.to(self.head.weight.dtype))


@each_backend_in_time
@pytest.mark.parametrize("change", CHANGES)
def test_converted_in_mid_run(backend: str, change: str) -> None:
    """After a step, with the state forgotten, which is in the old dtype."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        side.step(loss_of(model, step), optimizer)
        if step == 2:
            CHANGES[change](model)
            optimizer.state.clear()

    share = 1.0 if change in ("double", "type", "a part") else 0.5
    optimizer = partial(AdamW, lr=1e-2, foreach=False)
    program = trained(Casting, each, optimizer=optimizer, steps=5, share=share)
    hazard(backend, program, moves=False, budgeted=change not in ("double", "type"))


@compared(each_backend)
def test_a_part_converted_and_back(side: Side, backend: str) -> None:
    """Its parameters stay those of the optimizer, which goes on with their state."""
    with side.block(Casting) as (model, optimizer):
        for step in range(5):
            side.step(loss_of(model, step), optimizer)
            if step == 2:
                model.layers[0].to(torch.bfloat16).to(torch.float32)


@each_paged
@pytest.mark.parametrize("change", ["bfloat16", "a part"])
def test_a_step_that_fails_half_way_is_lost(backend: str, change: str) -> None:
    """Gradients are converted with their parameters, and state is not: the step raises torch's
    error as plainly. Plainly some parameters have moved by then and others not; here it may be
    others, so the next step is refused."""
    side = Side(backend)
    model = Casting()
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=False)

    def go_on() -> None:
        optimizer.step()
        model.to("cpu")  # reads every parameter, so that all updates are made
        optimizer.step()

    def train() -> None:
        with side.offload(model, optimizer):
            side.train(model, optimizer, range(3))
            loss_of(model, 3).backward()
            CHANGES[change](model)
            with pytest.raises((RuntimeError, StepLostError)):
                go_on()
            optimizer.step()

    with pytest.raises(StepLostError, match="the step is lost; go on from the last checkpoint"):
        train()


@compared(each_paged)
@pytest.mark.parametrize("back", [False, True])
def test_what_is_converted_and_does_not_fit_is_refused_before_the_sample(
    side: Side, backend: str, back: bool
) -> None:
    """Nothing is changed by the refusal: the user converts back and trains on, or leaves."""
    model = Casting(width=128)
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=False)
    with side.offload(model, optimizer, share=0.0):
        for step in range(4):
            side.step(F.cross_entropy(*scored(model, step)), optimizer)
            if step == 1:
                model.double()
                optimizer.state.clear()
                for _ in range(2 if side.backend else 0):
                    with pytest.raises(BudgetError, match=r"has .* now and had .* needs"):
                        scored(model, 2)
                side.see("converted", dict(model.named_parameters()))
                if not back:
                    break
                model.float()


def scored(model: nn.Module, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets of a network that is 128 wide."""
    x, y = batch(step, width=128)
    return model(x).float(), y


@stepwise(each_backend_in_time, Casting, steps=5)
def test_back_and_forth(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Evaluated in half precision between steps, and converted back: bits are lost, the same."""
    side.step(loss_of(model, step), optimizer)
    if step in (1, 3):
        model.to(torch.bfloat16)
        with torch.no_grad():
            side.see("score", model(batch(50)[0]))
        model.to(torch.float32)
