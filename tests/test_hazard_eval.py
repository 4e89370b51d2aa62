"""Hazard: passes that do not train, between passes that do.

The graph: a network with dropout and batch norm, evaluated under ``eval()``, ``no_grad`` and
``inference_mode`` right after a step, when updates wait, within an accumulation, between forward
and backward, and by another thread. They must see the step, and neither break the plan nor leave
inference tensors in parameters, gradients or state.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hazards import Side, batch, compared, each_backend, each_backend_in_time, loss_of, stepwise
from torch import nn

MODES: dict[str, Any] = {
    "eval": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


@stepwise(each_backend_in_time, network, steps=5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["after the first", "later", "before backward"])
def test_a_pass_between(
    side: Side, model: Any, optimizer: Any, step: int, mode: str, when: str
) -> None:
    """Right after the first step, first updates, which make state, are made in it."""
    loss = loss_of(model, step)
    if when != "before backward":
        side.step(loss, optimizer)
    if step or when != "later":
        model.eval()
        with MODES[mode]():
            side.see("score", loss_of(model, 50 + step))
            side.see("weights", model[0].weight.norm())
        model.train()
    if when == "before backward":
        side.step(loss, optimizer)


@stepwise(each_backend, network)
def test_a_step_under_inference_mode_fails_as_plainly(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Zeroing and stepping inside of it; then training goes on."""
    within = torch.inference_mode() if step == 1 else None
    side.step(loss_of(model, step), optimizer, within=within)


@stepwise(each_backend)
def test_a_pass_on_another_thread(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """It ends before the next forward begins, and uses the weights of the step."""

    def score() -> None:
        with torch.no_grad():
            side.see("score", loss_of(model, 50 + step))

    side.step(loss_of(model, step), optimizer)
    thread = threading.Thread(target=score)
    thread.start()
    thread.join()


@compared(each_backend, moves=False, aside=False)
@pytest.mark.parametrize("where", ["no_grad", "inference_mode"])
def test_no_training_at_all(side: Side, where: str) -> None:
    model = network().eval()
    with side.offload(model, share=0.6), MODES[where]():
        for step in range(6):
            side.see("out", model(batch(step)[0]))
