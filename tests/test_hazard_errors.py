"""Hazard: an exception anywhere in a step, after which training goes on.

The graph: linear layers with a fuse that blows in forward, in a hook, in backward (an autograd
Function, a tensor's hook), in the loss, in the closure or in a hook of the step, at a chosen step;
the loop catches it, zeroes the gradients or not, and goes on. Exceptions that unwind past forward
leave it without its end; what was saved for a backward that will not come must be let go.
"""

from __future__ import annotations

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
    each_paged,
    hazard,
    loss_of,
)
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from dynoffload.errors import StepLostError


class Blown(Exception):
    """The test's own."""


class Interrupt(KeyboardInterrupt):
    """No `Exception`: forward hooks do not run after it."""


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Blown


class Fused(Mlp):
    blows = ""
    error: type[BaseException] = Blown

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + F.gelu(layer(x))
            if index == 2:
                if self.blows == "forward":
                    raise self.error
                if self.blows == "function":
                    x = Fuse.apply(x)
                if self.blows == "hook of a tensor":
                    x.register_hook(self.blow)
        return self.head(x)

    def blow(self, *args: Any) -> None:
        raise self.error


STAGES = ["forward", "function", "hook of a tensor", "hook", "loss", "closure", "hook of step"]


@compared(each_backend_in_time)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("error", "zero"), [(Blown, False), (Interrupt, True)])
def test_training_goes_on(side: Side, stage: str, error: type[BaseException], zero: bool) -> None:
    """Twice in a row, so that the second meets what the first has left."""
    model = Fused()
    model.error = error
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, share=0.4):
        for step in range(7):
            bad = step in (2, 3)
            model.blows = stage if bad else ""
            handle: Any = None
            if bad and stage == "hook":
                handle = model.layers[3].register_forward_pre_hook(model.blow)
            if bad and stage == "hook of step":
                handle = optimizer.register_step_pre_hook(model.blow)
            x, y = batch(step)
            try:
                loss = F.cross_entropy(model(x), y)
                if bad and stage == "loss":
                    raise error
                loss.backward()
                if bad and stage == "closure":
                    optimizer.step(model.blow)
                else:
                    optimizer.step()
            except (Blown, Interrupt) as caught:
                side.see("caught", type(caught).__name__)
            finally:
                if handle is not None:
                    handle.remove()
            if zero or not bad:
                optimizer.zero_grad()


@compared(each_backend)
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_the_block_ends_by_an_exception(side: Side, stage: str) -> None:
    """And the model trains on, plainly and in another block."""
    model = Fused()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            side.see("loss", loss)

    try:
        with side.offload(model, optimizer):
            train(0, 6)
            model.blows = "forward" if stage == "forward" else "function"
            train(6, 7)
    except Blown:
        side.see("left", stage)
    model.blows = ""
    train(7, 8)
    with side.offload(model, optimizer):
        train(8, 14)


@each_backend
def test_anomaly_detection(backend: str) -> None:
    """A NaN in backward raises, and training goes on."""

    class Rooted(Mlp):
        bad = False

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out * torch.sqrt(out.new_zeros(1) * out.sum()) if self.bad else out

    def program(side: Side) -> None:
        with side.block(Rooted) as (model, optimizer):
            with torch.autograd.detect_anomaly():
                for step in range(6):
                    model.bad = step == 2
                    x, y = batch(step)
                    side.fails("backward", F.cross_entropy(model(x), y).backward)
                    if not model.bad:
                        optimizer.step()
                    optimizer.zero_grad()

    with pytest.warns(UserWarning, match="Anomaly"):
        hazard(backend, program)


@compared(each_paged)
def test_backward_after_the_block_is_refused(side: Side) -> None:
    """What forward saved is gone with the block; model and optimizer go on from the last step."""
    with side.block() as (model, optimizer):
        for step in range(3):
            side.step(loss_of(model, step), optimizer)
        late = loss_of(model, 3)
    if side.backend is not None:
        with pytest.raises(StepLostError, match=r"call backward\(\) inside the block"):
            late.backward()
        optimizer.zero_grad()
    side.see_state(model, optimizer)
    side.step(loss_of(model, 4), optimizer)
    side.see_state(model, optimizer)
