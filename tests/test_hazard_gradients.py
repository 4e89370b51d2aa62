"""Hazard: gradients that users read, write, replace and keep between backward and the next one.

The graph: linear layers, whose gradients are accumulated over micro-batches, clipped by norm and by
value, zeroed in place or set to None, put in by hand, or kept in a buffer that the user made. Each
must come after the update that still waits for the old gradient.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from exactness import HOME
from hazards import (
    Mlp,
    Side,
    compared,
    each_backend,
    each_backend_in_time,
    hazard,
    loss_of,
    stepwise,
)
from torch import nn
from torch.optim import SGD, AdamW

from dynoffload.units import format_bytes


def change(how: str, model: Any) -> None:
    """Change gradients; what is written by ``.data`` is not counted by their versions."""
    parameters, first, second = (
        list(model.parameters()),
        model.layers[0].weight,
        model.layers[1].weight,
    )
    match how:
        case "by .data":
            for parameter in parameters:
                parameter.grad.data.mul_(0.25)
        case "replaced":
            for parameter in parameters:
                parameter.grad = parameter.grad.sign()
        case "traded":
            first.grad, second.grad = second.grad, first.grad
        case "one for two":
            first.grad = second.grad
        case "transposed":
            model.layers[3].weight.grad = model.layers[3].weight.grad.t()
        case "clipped by norm":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        case "each clipped by its norm":
            for parameter in parameters:
                nn.utils.clip_grad_norm_(parameter, 0.05, foreach=False)
        case "clipped by value":
            nn.utils.clip_grad_value_(parameters, 1e-3)
        case "zeroed":
            first.grad.zero_()
        case "other .data":
            for parameter in parameters:
                parameter.grad.data = parameter.grad / (parameter.grad.norm() + 1e-6)
        case _:
            raise AssertionError(how)


WRITES = (
    "by .data",
    "replaced",
    "traded",
    "one for two",
    "transposed",
    "clipped by norm",
    "each clipped by its norm",
    "clipped by value",
    "zeroed",
    "other .data",
)


@stepwise(each_backend_in_time, steps=6, aside=lambda how: how != "transposed")
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_changed_before_the_step(
    model: Any, optimizer: Any, step: int, how: str, set_to_none: bool
) -> None:
    """Before the last of three backwards, and after it."""
    for part in range(3):
        if part == 2 and how in ("zeroed", "by .data"):
            change(how, model)
        (loss_of(model, 10 * step + part) / 3).backward()
    if step:
        change(how, model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


@each_backend
def test_gradients_in_a_buffer_of_the_users(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """``p.grad`` are views of one flat tensor, as data parallelism by hand keeps them: backward
    accumulates there, the user scales the flat tensor, and the step reads it. It is counted, and
    passes the budget: once, a warning names one of them."""

    def program(side: Side) -> None:
        with side.block() as (model, optimizer):
            flat = torch.zeros(sum(p.numel() for p in model.parameters()), device=HOME)
            parts = flat.split([p.numel() for p in model.parameters()])
            for parameter, part in zip(model.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter)
            for step in range(4):
                loss_of(model, step).backward()
                side.see("norm", flat.norm())
                flat.mul_(0.5)
                optimizer.step()
                flat.zero_()

    with caplog.at_level("WARNING", logger="dynoffload"):
        paged = hazard(backend, program, moves=False, budgeted=False)
    if backend in ("emulated", "aside"):
        return
    ((session, budget),) = paged.sessions
    flat_bytes = 4 * sum(p.numel() for p in session.model.parameters())
    peaks = [step.peak_fast_bytes for step in session.log.steps]
    assert max(peaks) > budget, "this shows nothing"
    assert min(peaks) >= flat_bytes
    (told,) = (r.getMessage() for r in caplog.records if "more than the budget of" in r.message)
    assert re.search(rf"the largest is '[\w.]+\.grad' with {format_bytes(flat_bytes)}", told)


@compared(each_backend)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_gradient_that_the_user_keeps(side: Side, when: str) -> None:
    """The tensor that was ``p.grad`` goes on being it, while nobody puts another in its place."""
    model = Mlp().to(HOME)
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    kept = []
    if when == "before":
        loss_of(model, 50).backward()
        kept = [p.grad for p in model.parameters()]
    with side.offload(model, optimizer, states=1):
        for step in range(4):
            loss_of(model, step).backward()
            if not kept:
                kept = [p.grad for p in model.parameters()]
            side.see("kept", kept)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            kept[0].add_(0.01)


@compared(each_backend, budgeted=False)
def test_data_of_parameters_replaced(side: Side) -> None:
    """``p.data = x``, with ``x`` kept by the user or not, between step and forward."""
    with side.block(share=0.6) as (model, optimizer):
        kept = []
        for step in range(5):
            side.step(loss_of(model, step), optimizer)
            model.layers[1].weight.data = model.layers[1].weight.data * 0.9
            if step == 1:
                kept.append(torch.full((64, 64), 0.01, device=HOME))
                model.layers[2].weight.data = kept[0]
            if step == 3:
                kept[0].mul_(2)
        side.see("kept", kept)


@compared(each_backend)
@pytest.mark.parametrize("what", ["weight", "state"])
def test_a_gradient_that_is_memory_of_another_parameter(side: Side, what: str) -> None:
    """Whose update waits: the step reads what that makes of it."""
    model = Mlp()
    lender, taker = model.layers[0].weight, model.layers[3].weight
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer):
        for step in range(4):
            side.step(loss_of(model, step), optimizer)
            if step:
                lent = lender if what == "weight" else dict.get(optimizer.state, lender)["exp_avg"]
                taker.grad = lent.detach()
                optimizer.step()
                optimizer.zero_grad()
