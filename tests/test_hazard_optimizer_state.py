"""Hazard: the state of an optimizer, and optimizers that wrap others.

The graph: a few linear layers whose optimizer's state is reset, put away, copied and looked at
while updates wait, or lies in a buffer of the user's; and optimizers by type that hold another one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from exactness import HOME
from hazards import (
    Mlp,
    Side,
    compared,
    each_backend,
    each_paged,
    guarded,
    hazard,
    loss_of,
    stepwise,
)
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import dynoffload
from dynoffload.errors import ConfigError


@compared(each_backend, budgeted=False)
def test_state_in_a_buffer_of_the_users(side: Side) -> None:
    """It stays where it is: the buffer shows every update."""
    model = Mlp().to(HOME)
    weights = [layer.weight for layer in model.layers]
    optimizer = AdamW(model.parameters(), lr=1e-2)
    side.step(loss_of(model, 0), optimizer)
    flat = torch.cat([optimizer.state[w]["exp_avg"].flatten() for w in weights])
    for number, part in enumerate(flat.split(64 * 64)):
        optimizer.state[weights[number]]["exp_avg"] = part.view(64, 64)
    with side.offload(model, optimizer):
        for step in range(1, 4):
            side.step(loss_of(model, step), optimizer)
            side.see("buffer", flat)
        flat.zero_()
        side.step(loss_of(model, 4), optimizer)


def _assign(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def _set_state(optimizer: Optimizer) -> None:
    optimizer.__setstate__({"state": defaultdict(dict)})


def _set_entries(optimizer: Optimizer) -> None:
    for parameter in _of(optimizer):
        optimizer.state[parameter] = {}


def _merge(optimizer: Optimizer) -> None:
    optimizer.state |= {parameter: {} for parameter in _of(optimizer)}


def _of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize(
    "reset",
    [_assign, _set_state, _set_entries, _merge],
    ids=lambda reset: reset.__name__,
)
@stepwise(each_paged, partial(Mlp, depth=2), share=0.5)
def test_state_that_is_reset(
    side: Side, model: Any, optimizer: Any, step: int, reset: Callable[[Optimizer], None]
) -> None:
    """After the first step, whose state is still to come where its updates wait; and after
    another."""
    side.step(loss_of(model, step), optimizer)
    if step in (0, 2):
        reset(optimizer)


def change(how: str, model: Any, optimizer: Optimizer) -> None:
    """Change parameters or state; what is written by arrays or ``.data`` raises no version."""
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        match how:
            case "parameters by arrays":
                parameter.data.numpy()[...] *= 0.999
            case "parameters transposed" if parameter.shape[0] == parameter.shape[-1]:
                parameter.data = parameter.data.t()
            case "state written":
                state["exp_avg"].mul_(0.9)
                state["step"].add_(1)
            case "state replaced":
                state["exp_avg_sq"] = state["exp_avg_sq"] * 2
            case "other .data of state":
                state["exp_avg"].data = torch.zeros_like(state["exp_avg"])
            case "counts by arrays" if number % 2:
                state["step"].data.fill_(1)
            case "counts by arrays":
                state["step"].numpy()[...] = 1


@pytest.mark.parametrize(
    "how",
    [
        *("parameters by arrays", "parameters transposed", "state written", "state replaced"),
        *("other .data of state", "counts by arrays"),
    ],
)
@stepwise(guarded, partial(Mlp, depth=2), share=0.5, steps=6)
def test_changed_between_backward_and_step(model: Any, optimizer: Any, step: int, how: str) -> None:
    loss_of(model, step).backward()
    if step % 3 == 2:
        change(how, model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("before", [False, True], ids=["of the block", "of before the block"])
@compared(guarded)
def test_state_that_is_put_away_and_back(side: Side, before: bool) -> None:
    """What waited when it was put away is there when it comes back."""
    model = Mlp(depth=2)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    kept = optimizer.state
    with side.offload(model, optimizer, share=0.5):
        for step in range(4):
            side.step(loss_of(model, step), optimizer)
            if step == 0:
                kept = kept if before else optimizer.state
                optimizer.state = kept if before else defaultdict(dict)
                optimizer.step()  # without a gradient
            if step == 2:
                optimizer.state = kept


LOOKS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "reversed": reversed,
    "ne": lambda state: (state != {}) and dict.keys(state),
    "repr": lambda state: repr(state) and dict.keys(state),
}


@pytest.mark.parametrize("look", LOOKS)
@stepwise(guarded, partial(Mlp, depth=2), share=0.5, steps=2)
def test_copies_of_the_state_and_looks_at_it(
    side: Side, model: Any, optimizer: Any, step: int, look: str
) -> None:
    """Whatever looks at the whole sees all entries; a copy is a plain mapping of the same ones."""
    side.step(loss_of(model, step), optimizer)
    if step == 0:
        found = LOOKS[look](optimizer.state)
        side.see("entries", len(list(found)))
        if look == "copy":
            side.see("type", type(found) is defaultdict)
            side.see("values", [found[parameter] for parameter in model.parameters()])


@pytest.mark.parametrize("kind", [AdamW, SGD], ids=lambda kind: kind.__name__)
@compared(each_backend)
def test_the_order_of_the_entries(side: Side, kind: type[Optimizer]) -> None:
    """That of a whole step, also where a gradient comes late and an entry is made anew."""
    model = Mlp(depth=2)
    options = {"lr": 1e-2} if kind is AdamW else {"lr": 1e-2, "momentum": 0.9}
    optimizer = kind(model.parameters(), **options)
    parameters = list(model.parameters())
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    with side.offload(model, optimizer, share=0.5):
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == 0:
                parameters[1].grad = parameters[2].grad = None
            optimizer.step()
            if step in (0, 3):
                side.see("entries", [numbers[parameter] for parameter in optimizer.state])
            if step == 1:
                del optimizer.state[parameters[3]]
    side.see("entries", [numbers[parameter] for parameter in optimizer.state])
    side.see("saved", list(optimizer.state_dict()["state"]))


class Wrapper(Optimizer):
    """An optimizer by type, as Opacus' is: torch's `__init__` has never run."""

    def __init__(self, inner: Optimizer) -> None:
        self.original = inner

    param_groups = property(lambda self: self.original.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.original.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.original.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return self.original.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.original.state_dict()


class Ahead(Wrapper):
    """As timm's Lookahead: hooks that are never called, and slow weights of its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    state: ClassVar[dict[Any, Any]] = {}  # type: ignore[assignment, misc]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for parameter, slow in self.slow.items():
            slow.lerp_(parameter.data, 0.5)
            parameter.data.copy_(slow)
        return loss


class Slow(Optimizer):
    """A Lookahead that is an optimizer in full, and names the one it wraps as accelerate's does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.optimizer, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                parameter.data.copy_(slow.lerp_(parameter.data, 0.5))
        return loss


@each_backend
@pytest.mark.parametrize("kind", [Wrapper, Ahead, Slow])
def test_an_optimizer_that_wraps_one_of_torch(
    backend: str, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What it wraps is paged; of what it keeps itself it is said that nobody counts it."""

    def program(side: Side) -> None:
        model = Mlp(depth=2).to(HOME)
        optimizer = kind(AdamW(model.parameters(), lr=1e-2))
        with side.offload(model, optimizer, share=0.5) as session:
            for step in range(4):
                side.step(loss_of(model, step), optimizer)
            assert session is None or len(session.log.steps) == 4

    hazard(backend, program, budgeted=kind is Wrapper)
    told = f"{kind.__name__} wraps the AdamW that is paged: what it keeps" in caplog.text
    assert told == (kind is not Wrapper)


class Headless(Optimizer):
    """Torch's `__init__` has never run, and there is nothing else in it."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups, self.state = [{"params": list(parameters)}], defaultdict(dict)
        self.defaults = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("it must be refused")


def test_an_optimizer_that_leaves_torchs_init_out_is_told_the_remedy() -> None:
    model = Mlp(depth=2)
    with pytest.raises(ConfigError, match=r"Headless leaves out the __init__ of torch\.optim\.Opt"):
        with dynoffload.offload(model, Headless(model.parameters()), budget="4MB"):
            pytest.fail("the block must not begin")
