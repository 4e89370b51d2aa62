"""Days in the life of a random graph: what its user does in one step.

`live` trains a `Graph` for one day of its plan and returns what there was to see.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from graphs import WIDTH, Graph, Stop
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adamw fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
    "sgd": lambda p: SGD(p, lr=1e-1, momentum=0.9),
    "sgd foreach": lambda p: SGD(p, lr=1e-1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3, centered=True),
}


def _nothing() -> None:
    """What `live` calls where nobody wants to know."""


def live(
    model: nn.Module,
    optimizer: Optimizer,
    day: str,
    number: int,
    autocast: bool,
    changes: Callable[[], None] = _nothing,
) -> list[Any]:
    """Train one day, and return what was seen.

    Args:
        model: a `Graph`.
        optimizer: of its parameters.
        day: one of `graphs.DAYS`.
        number: of the day, which seeds what is random in it.
        autocast: to bfloat16.
        changes: called before anything but gradients is changed.
    """
    assert isinstance(model, Graph)
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(int(torch.randint(3, 40, (), generator=generator)), WIDTH, generator=generator)
    x = x.to(model.unused.dtype)
    torch.manual_seed(number)
    model.fail = ""
    seen: list[Any] = []

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float().square().mean()

    def descend(loss: Tensor, **options: Any) -> None:
        if loss.requires_grad:  # else no weight was met
            loss.backward(**options)

    if any(node.kind == "buffer" for node in model.plan.nodes):
        changes()
    if day in ("error in forward", "error in backward"):
        model.fail = day.rsplit(" ", 1)[1]
        with contextlib.suppress(Stop):
            descend(loss_of(x))
        model.fail = ""
        optimizer.zero_grad()
    if day == "evaluation":
        model.eval()
        with torch.no_grad():
            seen.append(loss_of(x))
        model.train()
    if day == "state read":
        seen.append(copy.deepcopy(model.state_dict()))
        seen.append(copy.deepcopy(optimizer.state_dict()["state"]))
    if day == "state loaded":
        changes()
        state, its = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        descend(loss_of(x))
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(state)
        optimizer.load_state_dict(its)
    if day == "weights moved":
        changes()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
    with contextlib.ExitStack() as hooks:
        if day in HOOKS:
            for parameter in [*model.parameters()][:: 1 + number % 2]:
                hooks.callback(parameter.register_hook(HOOKS[day]).remove)
        loss = loss_of(x)
        if day == "gradient penalty" and not autocast:
            loss = _penalised(model, loss)
        descend(loss, retain_graph=day == "retained")
        if day == "retained":
            descend(loss)
        if day == "two backwards":
            descend(loss_of(x * 2))
    seen.append(loss.detach())
    if day == "clipped by norm":
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    if day == "clipped by value" and any(p.grad is not None for p in model.parameters()):
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    if day == "gradients read":
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    changes()
    if day != "no step":
        optimizer.step()
    if day == "gradients dropped":
        seen.append([gradient.clone() for gradient in model.held])
        model.held.clear()
    if day == "gradients kept":
        model.held += [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad(set_to_none=day != "zeroed in place")
    return seen


def _penalised(model: Graph, loss: Tensor) -> Tensor:
    """Return a loss with the gradient's gradient in it, where torch has one."""
    if not loss.requires_grad or any(node.kind == "reentrant" for node in model.plan.nodes):
        return loss  # reentrant checkpoints refuse grad()
    weights = [p for p in model.parameters() if p.dim() > 1]
    found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    squares = (g.float().square().sum() for g in found if g is not None and g.requires_grad)
    return loss + sum(squares, start=torch.zeros(()))


def _in_part(gradient: Tensor) -> Tensor:
    """Return a gradient of which one slice, row or element is left."""
    kept = torch.zeros_like(gradient)
    kept[-1] = gradient[-1]
    return kept


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "hooks give zeros": torch.zeros_like,
    "hooks give parts": _in_part,
}
"""Days of hooks on parameters -> what they put in the place of a gradient."""
