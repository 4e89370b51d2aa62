"""Hazard: passes that do not train, between passes that do.

The graph: a network with dropout and batch norm, evaluated under ``eval()``, ``no_grad`` and
``inference_mode`` right after a step, when updates wait, within an accumulation, between forward
and backward, and by another thread. They must see the step, and neither break the plan nor leave
inference tensors in parameters, gradients or state.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hazards import Side, batch, each_backend, each_backend_in_time, hazard, loss_of, trains
from torch import nn
from torch.optim import AdamW

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


@each_backend_in_time
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["after the first", "later", "before backward"])
def test_a_pass_between(backend: str, mode: str, when: str) -> None:
    """Right after the first step, first updates, which make state, are made in it."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
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

    trains(backend, each, network, steps=5)


@each_backend
def test_a_step_under_inference_mode_fails_as_plainly(backend: str) -> None:
    """Zeroing and stepping inside of it; then training goes on."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        loss_of(model, step).backward()
        if step == 1:
            with torch.inference_mode():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()

    trains(backend, each, network, steps=6)


@each_backend
def test_a_pass_on_another_thread(backend: str) -> None:
    """It ends before the next forward begins, and uses the weights of the step."""

    def program(side: Side) -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 10))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        found: list[torch.Tensor] = []

        def score(step: int) -> None:
            with torch.no_grad():
                found.append(loss_of(model, 50 + step))

        with side.offload(model, optimizer):
            for step in range(4):
                side.step(loss_of(model, step), optimizer)
                thread = threading.Thread(target=score, args=(step,))
                thread.start()
                thread.join()
        side.see("found", found)

    hazard(backend, program)


@each_backend
@pytest.mark.parametrize("where", ["no_grad", "inference_mode"])
def test_no_training_at_all(backend: str, where: str) -> None:
    def program(side: Side) -> None:
        model = network().eval()
        scope: AbstractContextManager[Any] = MODES[where]()
        with side.offload(model, share=0.6), scope:
            for step in range(6):
                side.see("out", model(batch(step)[0]))

    hazard(backend, program, moves=False, aside=False)
