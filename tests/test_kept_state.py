"""Hazard: what an optimizer keeps elsewhere than in a tensor of a parameter's size.

The optimizer keeps lists, tuples, dicts and dataclasses of tensors, a matrix for each small
parameter, a result that is a view, and a tensor of its own. All are paged between steps, and are
ordinary tensors in the same containers after the block.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hazards import Mlp, Side, compared, each_backend, each_paged, hazard, loss_of, trained
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dynoffload.runtime.counting import tensors_of
from dynoffload.runtime.session import Session
from dynoffload.runtime.updates.kept_state import state_of, tensors_within

LEAST = 4096  # bytes: more than what stays in memory under the budgets of hazards


@dataclass(eq=False)
class Pair:
    first: Tensor
    rest: list[Tensor] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Pair)
        return torch.equal(self.first, other.first) and torch.equal(self.rest[0], other.rest[0])


class Nested(Optimizer):
    """Keeps what it keeps in containers; as gradients are rotated, much of it is made anew."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.total = torch.zeros(64, 64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            matrix = parameter.grad.flatten().outer(torch.ones(64)).view(-1, 64)[:64]
            if not state:
                state["list"] = [torch.zeros_like(matrix), None]
                state["nest"] = {"pair": (Pair(matrix.clone(), [matrix.clone()]), 3)}
            state["list"] = [matrix.mul(0.1).add_(state["list"][0], alpha=0.9), None]
            pair = state["nest"]["pair"][0]
            pair.first.lerp_(matrix, 0.1)
            pair.rest[0] = (pair.first * 2).view(matrix.shape)
            state["view"] = (pair.rest[0] @ matrix.t()).view(-1)
            self.total.add_(state["list"][0].sum(), alpha=1e-3)
            parameter.add_(parameter.grad + pair.first.mean() + self.total.mean(), alpha=-1e-2)


def _large(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [(name, one) for name, one in state_of(optimizer) if one.nbytes >= LEAST]


def _see(side: Side, optimizer: Optimizer) -> None:
    side.see("nested", dict(enumerate(one for _, one in state_of(optimizer))))


def _assert_paged(session: Session | None, optimizer: Optimizer) -> None:
    if session is not None and session.paging:
        device = session._paging.device  # type: ignore[union-attr]
        outside = [name for name, one in _large(optimizer) if device.owner(one) < 0]
        assert not outside


@compared(each_backend, aside=False)
def test_state_in_containers_and_larger_than_its_parameter(side: Side) -> None:
    """Also after a load; the containers hold the same objects after the block."""
    model = Mlp()
    optimizer = Nested(model.parameters())
    side.step(loss_of(model, 0), optimizer)
    tensors = dict(tensors_within(optimizer.state[model.layers[0].weight], ""))
    counted = {id(one) for one in tensors_of(model, optimizer)}
    assert {id(one) for _, one in state_of(optimizer)} <= counted
    kept = copy.deepcopy(optimizer.state_dict())
    with side.offload(model, optimizer, share=0.5) as session:
        _assert_paged(session, optimizer)
        for step in range(1, 5):
            side.step(loss_of(model, step), optimizer)
            _assert_paged(session, optimizer)
    first = optimizer.state[model.layers[0].weight]["nest"]["pair"][0].first
    side.see("same object", first is tensors[".nest.pair.0.first"])
    with side.offload(model, optimizer, share=0.5) as session:
        optimizer.load_state_dict(kept)
        side.step(loss_of(model, 5), optimizer)
        _assert_paged(session, optimizer)
    _see(side, optimizer)


@each_paged
def test_state_that_cannot_be_paged_is_named(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        if step == 0:
            optimizer.total = torch.zeros(512, 512)[:64, :64]
        side.step(loss_of(model, step), optimizer)

    hazard(backend, trained(Mlp, each, optimizer=Nested, steps=3), budgeted=False)
    assert "the largest is 'total' with 1.00 MiB" in caplog.text
    assert "a tensor of optimizer state that is part of a larger tensor" in caplog.text


def test_tensors_in_other_containers() -> None:
    one = torch.zeros(3)
    containers: list[Any] = [
        *(deque([one]), UserList([one]), UserDict({"kept": one}), {one}, frozenset([one])),
        *(SimpleNamespace(kept=one), MappingProxyType({"kept": one})),
    ]
    for container in containers:
        assert [found for _, found in tensors_within(container, "")] == [one]


class Historic(Optimizer):
    """Keeps the last gradients in a queue, and a tensor that is given to it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.history: deque[Tensor] = deque(maxlen=3)
        self.fixed: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        self.history.append(torch.cat([one.grad.flatten() for one in parameters]))
        mean = sum(self.history) / len(self.history)
        sizes = [one.numel() for one in parameters]
        for parameter, part in zip(parameters, mean.split(sizes), strict=True):
            parameter.add_(part.view_as(parameter), alpha=-1e-2)


@pytest.mark.parametrize("holder", ["nobody", "weak reference", "graph"])
@compared(each_paged, budgeted=False)
def test_a_queue_of_gradients_is_paged(side: Side, holder: str) -> None:
    """And a view that torch cannot swap, as somebody holds it, stays where it is."""
    model = Mlp()
    optimizer = Historic(model.parameters())
    with side.offload(model, optimizer, share=0.5, states=3) as session:
        view = optimizer.fixed = torch.arange(64.0 * 64).view(64, 64)
        kept: Any = weakref.ref(view) if holder == "weak reference" else None
        if holder == "graph":
            kept = torch.ones(64, 64, requires_grad=True) * view
        places = []
        for step in range(6):
            side.step(loss_of(model, step), optimizer)
            if session is not None:
                device: Any = session._paging.device  # type: ignore[union-attr]
                assert all(device.owner(one) >= 0 for one in optimizer.history)
                assert (device.owner(view) < 0) == (holder != "nobody")
                places.append(len(device._places))
        assert session is None or places[-1] == places[-2], "a region is left"
        assert id(view) in {id(one) for one in tensors_of(model, optimizer)}
        side.see("view", view)
        del kept
    side.see("history", list(optimizer.history))


class Twice(Optimizer):
    """Wraps an optimizer and is stepped by two calls, as sharpness-aware minimisation is."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = AdamW(self.param_groups, lr=1e-2)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=self.param_groups[0]["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["before"])
        self.base.step()
        self.zero_grad()


class Bare(Optimizer):
    """Torch's `__init__` has never run; it passes all to what it wraps."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


class Failing(Twice):
    """Its step fails, itself or in its closure."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            closure()
        raise ValueError("on purpose")


class Closed(Twice):
    """Both calls in one step, with a closure in between."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


class Stored(Twice):
    """Its step runs a forward of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            self.again()  # type: ignore[attr-defined]
        self.base.step()


class Several(Optimizer):
    """Steps two optimizers that it keeps in a list."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.optimizers = [AdamW(parameters[:2], lr=1e-2), AdamW(parameters[2:], lr=1e-2)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


def _behind(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return one that wraps a wrapper, and holds the innermost by two attributes."""
    optimizer = Twice(parameters)
    optimizer.also = optimizer.base  # type: ignore[attr-defined]
    optimizer.base = Bare(optimizer.base)  # type: ignore[assignment]
    return optimizer


def _one_call(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    side.step(loss_of(model, step), optimizer)


def _two_calls(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.first_step()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.second_step()
    side.see("loss", loss)


def _after_failures(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    for closure in (None, fail):
        if step == 0:
            side.fails("step", optimizer.step, closure)
    _two_calls(side, model, optimizer, step)


def _with_closure(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    def closure() -> Tensor:
        loss = loss_of(model, step)
        loss.backward()
        return loss

    side.see("loss", optimizer.step(closure))


def _with_forward(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.again = lambda: loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


WRAPPING: dict[str, tuple[Callable[[Any], Optimizer], Callable[..., None]]] = {
    "two calls, behind a wrapper": (_behind, _two_calls),
    "after failures": (Failing, _after_failures),
    "a closure with forwards": (Closed, _with_closure),
    "a forward within": (Stored, _with_forward),
    "several in a list": (Several, _one_call),
}


@each_paged
@pytest.mark.parametrize("how", WRAPPING)
def test_steps_of_optimizers_that_wrap_others(backend: str, how: str) -> None:
    """Each is counted once, and what both keep is paged after it."""
    make, train = WRAPPING[how]

    def program(side: Side) -> None:
        model = Mlp()
        optimizer = make(model.parameters())
        with side.offload(model, optimizer) as session:
            for step in range(3):
                train(side, model, optimizer, step)
                _assert_paged(session, optimizer)
            assert session is None or len(session.log.steps) == 3
        _see(side, optimizer)

    hazard(backend, program)


@each_paged
@pytest.mark.parametrize("known", [True, False])
def test_an_optimizer_that_the_block_was_not_given_is_named(
    backend: str, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        if step == 0:
            other = AdamW(model.layers[1].parameters(), lr=1e-2)
            model.other = optimizer if known else other
        loss_of(model, step).backward()
        for one in (optimizer, model.other):
            one.step()
            one.zero_grad()

    def of_the_first(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(list(parameters)[:2], lr=1e-2)

    program = trained(Mlp, each, optimizer=of_the_first, steps=3)
    hazard(backend, program, aside=False, budgeted=False)
    found = [text for text in caplog.messages if "was not given" in text]
    assert len(found) == (0 if known else 1)
    assert all("AdamW, which offload()" in text for text in found)


class Momentum(nn.Module):
    """A frozen copy that follows the network, as its forward gives it new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = Mlp(), Mlp().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.data = mine.data * 0.9 + its.data * 0.1
            wanted = self.target(x)
        return self.online(x) - wanted


@each_backend
def test_memory_that_forward_gives_a_parameter_is_paged(backend: str) -> None:
    # An accelerator's queue may hold the new memory until the step has ended.
    hazard(backend, trained(Momentum), budgeted=backend != "emulated")


@each_paged
def test_gradients_with_a_graph_are_named(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        loss_of(model, step).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    with caplog.at_level(logging.WARNING):
        hazard(backend, trained(Mlp, each, steps=3), budgeted=False)
    assert caplog.text.count("backward(create_graph=True) made the gradient of") == 1
