"""After a lost step, ``load_state_dict`` of the model and of the optimizer together make up for it.

A step is lost as a hyperparameter makes updates fail half way. What is loaded then is a checkpoint
of the user's own, in every order; from there the run must have the bits of plain PyTorch. Whatever
loads less than all leaves the step lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from exactness import Twin, footprint_of
from hazards import Mlp, each_paged, guarded, loss_of
from torch import nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.errors import StepLostError

pytestmark = pytest.mark.timeout(120)

Saved = tuple[dict[str, Any], dict[str, Any]]


def optimizer_of(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer whose first group has what is paged."""
    every = list(parameters)
    groups = [{"params": [p for p in every if (p.dim() > 1) is paged]} for paged in (True, False)]
    return AdamW(groups, lr=1e-2, foreach=False)


def train(model: nn.Module, optimizer: Optimizer, start: int, stop: int) -> None:
    """Make the steps from ``start`` to ``stop``."""
    for step in range(start, stop):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def step_and_read(model: nn.Module, optimizer: Optimizer) -> None:
    """Make a step, and whichever updates of it were put off."""
    optimizer.step()
    loss_of(model, 9)


def lose(model: nn.Module, optimizer: Optimizer) -> None:
    """Lose a step, of which some updates are still to be made, and would fail too."""
    loss_of(model, 9).backward()
    group = optimizer.param_groups[0]
    eps, group["eps"] = group["eps"], "no number"  # which is found out when moments are changed
    with pytest.raises(TypeError, match="not str"):
        step_and_read(model, optimizer)
    group["eps"] = eps
    optimizer.zero_grad()


@contextmanager
def lost(backend: str) -> Iterator[tuple[Twin, Saved]]:
    """Yield twins of which the first has lost its third step, and a checkpoint of the second."""
    model = Mlp(depth=2)
    model.register_buffer("seen", torch.ones(3))
    twin = Twin(model, optimizer_of)
    config = {"backend": backend, "draft_share": 0.0}
    with twin.paged(footprint_of(twin.model), config=config):
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            train(model, optimizer, 0, 2)
        saved = twin.model.state_dict(), twin.optimizer.state_dict()
        saved = copy.deepcopy(saved)
        lose(twin.model, twin.optimizer)
        assert_lost(twin)
        yield twin, saved


def assert_lost(twin: Twin) -> None:
    """Assert that another step is refused."""
    with pytest.raises(StepLostError, match=r"session\.load\(\), or by load_state_dict\(\) of"):
        twin.optimizer.step()


@each_paged
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_both_loaded_make_up_for_it(backend: str, first: str) -> None:
    """In either order, and only both."""
    with lost(backend) as (twin, (weights, state)):
        loads: dict[str, Callable[[], Any]] = {
            "model": lambda: twin.model.load_state_dict(weights),
            "optimizer": lambda: twin.optimizer.load_state_dict(state),
        }
        loads.pop(first)()
        assert_lost(twin)
        loads.popitem()[1]()
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            train(model, optimizer, 2, 5)
    twin.assert_same()


def without_a_key(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load all but one parameter, which may be missing."""
    part = {name: value for name, value in weights.items() if name != "head.weight"}
    assert model.load_state_dict(part, strict=False).missing_keys == ["head.weight"]


def without_a_buffer(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load all parameters, but not all that a load may have cut off."""
    part = {name: value for name, value in weights.items() if name != "seen"}
    assert model.load_state_dict(part, strict=False).missing_keys == ["seen"]


def with_a_wrong_size(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load all but one parameter, whose size differs."""
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**weights, "head.weight": torch.zeros(3, 3)})


def by_parts(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load one module after the other, of which nobody knows when it is all."""
    for name, module in model.named_children():
        start = f"{name}."
        part = {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}
        module.load_state_dict(part)


def with_one_left_out(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load all but one parameter, of which a hook of the user's says that nothing is missing."""
    handle = model.head.register_load_state_dict_post_hook(  # type: ignore[union-attr, operator]
        lambda module, keys: keys.missing_keys.clear()
    )
    part = {name: value for name, value in weights.items() if name != "head.weight"}
    model.load_state_dict(part)
    handle.remove()


LESS = [without_a_key, without_a_buffer, with_a_wrong_size, by_parts, with_one_left_out]


@guarded
@pytest.mark.parametrize("load", LESS, ids=lambda load: load.__name__)
def test_less_does_not(backend: str, load: Callable[[nn.Module, dict[str, Any]], None]) -> None:
    """Until all is loaded at once."""
    with lost(backend) as (twin, (weights, state)):
        twin.optimizer.load_state_dict(state)
        load(twin.model, weights)
        assert_lost(twin)
        twin.model.load_state_dict(weights)
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            train(model, optimizer, 2, 3)
    twin.assert_same()


@guarded
def test_each_loss_needs_both_again(backend: str) -> None:
    """What was loaded before a step was lost makes up for nothing."""
    with lost(backend) as (twin, (weights, state)):
        twin.model.load_state_dict(weights)
        twin.optimizer.load_state_dict(copy.deepcopy(state))  # which is trained from then on
        lose(twin.model, twin.optimizer)
        twin.optimizer.load_state_dict(state)
        assert_lost(twin)
        twin.model.load_state_dict(weights)
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            train(model, optimizer, 2, 3)
    twin.assert_same()


def test_a_parameter_outside_of_the_model_is_not_loaded_with_it() -> None:
    """So a model's load does not make up for a step that may have changed it."""
    model, outside = Mlp(depth=2), nn.Parameter(torch.ones(64, 64))
    optimizer = optimizer_of([*model.parameters(), outside])
    config = {"page_bytes": 4096, "min_paged_bytes": 1024, "step_aside": False}
    with dynoffload.offload(model, optimizer, budget=footprint_of(model), config=config):
        train(model, optimizer, 0, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        lose(model, optimizer)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        with pytest.raises(StepLostError, match="the step is lost"):
            optimizer.step()
