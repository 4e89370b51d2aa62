"""Hazard: mixed precision, where casts of weights are kept and steps are skipped.

The graph: linear layers under `torch.autocast`, whose cache holds a low-precision copy of each
weight until its block ends, so that a weight used twice is cast once; gradient scaling, where the
step looks at all gradients, divides them, and is left out when one is not finite.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hazards import (
    Mlp,
    Side,
    compared,
    each_backend,
    each_backend_in_time,
    loss_of,
    stepwise,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW


class Twice(Mlp):
    """Each weight is used twice, and once with autocast off."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(layer(x)))
            with torch.autocast("cpu", enabled=False):
                x = x.float() + 0.1 * layer(x.float())
        return self.head(x)


class Unhooked(Mlp):
    """Its layers are not called: a weight that waits is updated while its cast is made, which
    holds the lock of autocast's cache."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, layer.weight, layer.bias).sin()
        return self.head(x)


@stepwise(each_backend, Unhooked, steps=5)
def test_a_weight_that_is_updated_as_it_is_cast(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, step)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    side.see("loss", loss)


@compared(each_backend_in_time, aside=lambda cache: not cache)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("around", ["forward", "loop"])
def test_autocast(side: Side, dtype: torch.dtype, cache: bool, around: str) -> None:
    """Around the loop, casts are kept over steps: old ones, as in plain PyTorch."""

    def cast(here: str) -> Any:
        kept = torch.autocast("cpu", dtype, cache_enabled=cache)
        return kept if here == around else nullcontext()

    with side.block(lambda: Twice(depth=4)) as (model, optimizer), cast("loop"):
        for step in range(6):
            with cast("forward"):
                loss = loss_of(model, step)
            side.step(loss, optimizer)


@stepwise(each_backend, steps=6, aside=False)
def test_eval_under_autocast_between_steps(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Casts made without grad are kept too, and a later forward with grad takes no such one."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            side.see("before", loss_of(model, 50 + step))
        loss = loss_of(model, step)
        side.step(loss, optimizer)
        with torch.inference_mode():
            side.see("after", loss_of(model, 50 + step))


@compared(each_backend_in_time)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_gradient_scaling(side: Side, fused: bool, clip: bool) -> None:
    """The third step overflows and is left out, with the scale halved after it."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    with side.offload(model, optimizer):
        for step in range(6):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, step)
            scaler.scale(loss).backward()
            if step == 2:
                model.layers[1].weight.grad[3, 4] = float("inf")
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            side.see("loss", loss)
            side.see("scale", scaler.get_scale())
