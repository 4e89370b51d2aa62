"""User hooks around a step see what they see plainly, whenever they were registered."""

from __future__ import annotations

from typing import Any

import pytest
from hazards import Mlp, Side, each_backend, each_paged, hazard, loss_of
from torch.optim import AdamW, Optimizer


@each_backend
@pytest.mark.parametrize("defer", ["auto", "never"])
def test_a_hook_registered_right_before_a_step_comes_before_it(backend: str, defer: str) -> None:
    """After backward, in the first step and in a later one; removed, it is not called again."""

    def program(side: Side) -> None:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        handles: list[Any] = []

        def halve(its: Optimizer, args: Any, kwargs: Any) -> None:
            parameters = [p for group in its.param_groups for p in group["params"]]
            side.see("parameters", len(parameters))
            for parameter in parameters:
                parameter.grad.mul_(0.5)

        with side.offload(model, optimizer, defer_updates=defer):
            for number in range(6):
                loss_of(model, number).backward()
                if number in (0, 3):
                    handles.append(optimizer.register_step_pre_hook(halve))
                if number == 4:
                    handles.pop(0).remove()
                optimizer.step()
                optimizer.zero_grad()
        assert "register_step_pre_hook" not in vars(optimizer)

    hazard(backend, program)


@each_paged
def test_a_hook_that_raises_right_before_a_step_leaves_all_as_it_was(backend: str) -> None:
    """Registered after backward; the groups are whole at once, and the next step is as plain."""

    def program(side: Side) -> None:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=1e-2)

        def refuse(its: Optimizer, args: Any, kwargs: Any) -> None:
            raise RuntimeError("not now")

        with side.offload(model, optimizer):
            side.step(loss_of(model, 0), optimizer)
            loss_of(model, 1).backward()
            handle = optimizer.register_step_pre_hook(refuse)
            side.fails("hook", optimizer.step)
            handle.remove()
            side.fails("argument", lambda: optimizer.step(speed=2))  # type: ignore[call-overload]
            side.see("parameters", sum(len(group["params"]) for group in optimizer.param_groups))
            optimizer.step()
            optimizer.zero_grad()
            side.step(loss_of(model, 2), optimizer)

    hazard(backend, program)
