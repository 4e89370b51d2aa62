"""Hazard: fused experts, which are paged by slices, converted in mid-run.

The graph: twenty-four experts of which a sample hits two, and a head. All, or one parameter, get
another dtype while updates of slices wait. That is refused before the next sample or step, with
nothing changed; what is converted back, as after an evaluation, trains on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fused_networks import Chosen
from hazards import Side, batch, compared, each_with_slices_in_time, hazard, trained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from dynoffload.errors import ConfigError

CHANGES: dict[str, Callable[[Chosen], object]] = {
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "data": lambda model: setattr(model.experts.up, "data", model.experts.up.data.double()),
}


class Casting(Chosen):
    """Takes any dtype of each parameter."""

    def forward(self, x: Tensor, hit: list[int]) -> Tensor:
        """Return ``[rows, width]`` for the same."""
        experts, out = self.experts, torch.zeros_like(x)
        for number in hit:
            up, down = experts.up[number], experts.down[number]
            hidden = F.gelu(F.linear(x.to(up.dtype), up))
            out = out + F.linear(hidden.to(down.dtype), down).to(x.dtype)
        return (x + out).to(self.head.dtype) @ self.head


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return a loss in single precision, of a sample that hits two experts."""
    rows, _ = batch(step, rows=5, width=32)
    return (model(rows, [step, 5 + step]).float() ** 2).mean()


def adamw(parameters: Any) -> Optimizer:
    """Return an optimizer that goes by each parameter's own dtype."""
    return AdamW(parameters, lr=1e-2, foreach=False)


@each_with_slices_in_time
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before a sample", "before step()"])
def test_converted_and_back(backend: str, change: str, when: str) -> None:
    """Refused as often as it is tried, and evaluated as it is."""
    told = (
        r"experts\.up was converted from torch\.float32 .* inside the offload\(\) block.*: convert "
        "it back, or leave the block"
    )

    def convert(side: Side, model: Any, refused: Callable[[], object]) -> None:
        CHANGES[change](model)
        with torch.no_grad():
            side.see("evaluated", loss_of(model, 9))
        for _ in range(2 if side.backend else 0):
            with pytest.raises(ConfigError, match=told):
                refused()
        model.float()

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        loss = loss_of(model, step)
        loss.backward()
        if step == 3 and when == "before step()":
            convert(side, model, optimizer.step)
        optimizer.step()
        optimizer.zero_grad()
        side.see("loss", loss)
        if step == 3 and when == "before a sample":
            convert(side, model, lambda: loss_of(model, 4))

    # What is converted lies outside of the pool, and so do its gradients.
    program = trained(partial(Casting, count=24), each, optimizer=adamw, steps=6)
    hazard(backend, program, budgeted=when == "before a sample")


@compared(each_with_slices_in_time)
def test_a_block_that_is_left_converted(side: Side) -> None:
    """What was converted stays so, with the bits that it had."""
    model = Casting(count=24)
    optimizer = adamw(model.parameters())
    with side.offload(model, optimizer):
        for step in range(3):
            side.step(loss_of(model, step), optimizer)
        model.bfloat16()
    side.see("converted", dict(model.named_parameters()))
    optimizer.state.clear()
    side.step(loss_of(model, 3), optimizer)
