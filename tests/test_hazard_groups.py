"""Hazard: parameter groups that change in mid-run.

The graph: layers of which some join the optimizer later by `Optimizer.add_param_group`: frozen
until then, trained but unlisted until then, or new modules that the session has never seen;
parameters that leave a group, move to another, or change their hyperparameters while updates wait.
"""

from __future__ import annotations

import torch
from hazards import Mlp, Side, each_backend, hazard, loss_of
from torch import nn
from torch.optim import SGD, AdamW


@each_backend
def test_frozen_parameters_join(backend: str) -> None:
    def program(side: Side) -> None:
        model = Mlp()
        for layer in model.layers[:2]:
            layer.requires_grad_(False)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with side.offload(model, optimizer):
            for step in range(6):
                if step in (2, 3):
                    layer = model.layers[3 - step]
                    layer.requires_grad_(True)
                    optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3})
                side.step(loss_of(model, step), optimizer)

    hazard(backend, program)


@each_backend
def test_unlisted_parameters_join(backend: str) -> None:
    """They have gradients by then, accumulated over steps."""

    def program(side: Side) -> None:
        model = Mlp()
        optimizer = SGD(model.layers[2:].parameters(), lr=1e-2, momentum=0.9)
        with side.offload(model, optimizer, states=1):
            for step in range(5):
                loss_of(model, step).backward()
                if step == 2:
                    late = [*model.layers[:2].parameters(), *model.head.parameters()]
                    optimizer.add_param_group({"params": late, "nesterov": True})
                optimizer.step()
                optimizer.zero_grad()

    hazard(backend, program)


@each_backend
def test_parameters_outside_of_the_model_join(backend: str) -> None:
    """They stay where they are, and are stepped with the others."""

    def program(side: Side) -> None:
        model, outside = Mlp(), nn.Linear(64, 64)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        with side.offload(model, optimizer):
            for step in range(5):
                if step == 2:
                    optimizer.add_param_group({"params": outside.parameters()})
                side.step(loss_of(lambda x: model(torch.tanh(outside(x))), step), optimizer)
        side.see_state(outside)

    hazard(backend, program)


@each_backend
def test_parameters_leave_and_change_group(backend: str) -> None:
    def program(side: Side) -> None:
        model = Mlp()
        optimizer = AdamW(
            [
                {"params": list(model.layers.parameters()), "weight_decay": 0.1},
                {"params": list(model.head.parameters()), "lr": 1e-3},
            ],
            lr=1e-2,
        )
        with side.offload(model, optimizer):
            for step in range(6):
                side.step(loss_of(model, step), optimizer)
                first, second = optimizer.param_groups[:2]
                if step == 1:
                    second["params"].append(first["params"].pop(0))
                if step == 3:
                    del optimizer.state[first["params"].pop()]
                second["lr"] *= 0.5
                second["betas"] = (0.8, 0.9)

    hazard(backend, program)


@each_backend
def test_schedulers_change_rates_while_updates_wait(backend: str) -> None:
    def program(side: Side) -> None:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=20)
        with side.offload(model, optimizer):
            for step in range(6):
                side.step(loss_of(model, step), optimizer)
                scheduler.step()

    hazard(backend, program)
