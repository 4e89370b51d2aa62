"""Hazard: parameter groups that change in mid-run, and hooks and scalers around a step.

The graph: layers of which some join the optimizer later by `Optimizer.add_param_group`: frozen
until then, trained but unlisted until then, or outside of the model; parameters that leave a group,
move to another, or change their hyperparameters while updates wait. Hooks around a step see what
they see plainly, whenever they were registered. Updates that wait from a plain step have no part in
the scaled step that follows: a scaler hands its scale, and whether a gradient is infinite, to the
optimizer for one step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from exactness import HOME
from fused_networks import PAGES, Chosen, chosen_loss
from hazards import (
    Mlp,
    Side,
    compared,
    each_backend_in_time,
    each_paged,
    hazard,
    loss_of,
    stepwise,
    trained,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer


def half_frozen() -> Mlp:
    """Return a network of which two layers are frozen."""
    model = Mlp()
    model.layers[:2].requires_grad_(False)
    return model


@stepwise(
    each_backend_in_time,
    half_frozen,
    optimizer=lambda every: AdamW([p for p in every if p.requires_grad], lr=1e-2),
    steps=6,
)
def test_frozen_parameters_join(side: Side, model: Any, optimizer: Any, step: int) -> None:
    if step in (2, 3):
        layer = model.layers[3 - step].requires_grad_(True)
        optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3})
    side.step(loss_of(model, step), optimizer)


def late(parameters: Any) -> Optimizer:
    """Return an optimizer that the first layers and the head are not given to."""
    return SGD(list(parameters)[4:10], lr=1e-2, momentum=0.9)


@stepwise(each_backend_in_time, optimizer=late, states=1, steps=5)
def test_unlisted_parameters_join(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """They have gradients by then, accumulated over steps."""
    loss_of(model, step).backward()
    if step == 2:
        joining = [*model.layers[:2].parameters(), *model.head.parameters()]
        optimizer.add_param_group({"params": joining, "nesterov": True})
    optimizer.step()
    optimizer.zero_grad()


@compared(each_backend_in_time)
def test_parameters_outside_of_the_model_join(side: Side) -> None:
    """They stay where they are, and are stepped with the others."""
    outside = nn.Linear(64, 64).to(HOME)

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": outside.parameters()})
        side.step(loss_of(lambda x: model(torch.tanh(outside(x))), step), optimizer)

    trained(Mlp, each, steps=5)(side)
    side.see_state(outside)


def two_groups(parameters: Any) -> Optimizer:
    """Return an optimizer of which the head is a group."""
    every = list(parameters)
    groups = [{"params": every[:-2], "weight_decay": 0.1}, {"params": every[-2:], "lr": 1e-3}]
    return AdamW(groups, lr=1e-2)


@stepwise(each_backend_in_time, optimizer=two_groups, steps=6)
def test_parameters_leave_and_change_group(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    side.step(loss_of(model, step), optimizer)
    first, second = optimizer.param_groups[:2]
    if step == 1:
        second["params"].append(first["params"].pop(0))
    if step == 3:
        del optimizer.state[first["params"].pop()]
    second["lr"] *= 0.5
    second["betas"] = (0.8, 0.9)


# Hooks


@pytest.mark.parametrize("defer", ["auto", "never"])
@compared(each_backend_in_time)
def test_a_hook_registered_right_before_a_step_comes_before_it(side: Side, defer: str) -> None:
    """After backward, in the first step and in a later one; removed, it is not called again."""
    handles: list[Any] = []

    def halve(its: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in its.param_groups for p in group["params"]]
        side.see("parameters", len(parameters))
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        loss_of(model, step).backward()
        if step in (0, 3):
            handles.append(optimizer.register_step_pre_hook(halve))
        if step == 4:
            handles.pop(0).remove()
        optimizer.step()
        optimizer.zero_grad()

    trained(Mlp, each, steps=6, defer_updates=defer)(side)


@stepwise(each_paged, steps=3)
def test_a_hook_that_raises_right_before_a_step_leaves_all_as_it_was(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Registered after backward; the groups are whole at once, and the next step is as plain."""

    def refuse(its: Optimizer, args: Any, kwargs: Any) -> None:
        raise RuntimeError("not now")

    loss_of(model, step).backward()
    if step == 1:
        handle = optimizer.register_step_pre_hook(refuse)
        side.fails("hook", optimizer.step)
        handle.remove()
        side.fails("argument", partial(optimizer.step, speed=2))
        side.see("parameters", sum(len(group["params"]) for group in optimizer.param_groups))
    optimizer.step()
    optimizer.zero_grad()


# Scalers


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Tensor]]] = {
    "experts that wait": (Chosen, lambda m, n: chosen_loss(m, (n, [range(6), [2], [3]][n]))),  # type: ignore
    "modules without a gradient": (Mlp, lambda m, n: loss_of(m.head if n else m, n)),
}


@each_paged
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("last", ["scaled", "overflows"])
def test_a_scaled_step_after_a_plain_one(backend: str, network: str, last: str) -> None:
    """The second step is scaled, or overflows and is skipped, and leaves some parameters out."""
    make, loss_of_step = NETWORKS[network]

    def program(side: Side) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
            loss = loss_of_step(model, step)
            if step == 1:
                scaler.scale(loss * (float("inf") if last == "overflows" else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()

        fused = partial(AdamW, lr=1e-2, fused=True)
        options = {"share": 0.5, **PAGES}
        trained(make, each, optimizer=fused, steps=3, **options)(side)

    hazard(backend, program)
