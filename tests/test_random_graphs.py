"""Random graphs, budgets, plans and mishaps: the bits are those of plain PyTorch.

Each case draws a network node by node, what happens on each day of its training, an optimizer, a
budget and a pilot that lies. An error in the middle of a forward or a backward is one that the user
catches; training goes on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, LyingPilot, Twin, assert_same, footprint_of, least_budget
from graphs import WIDTH, Graph, Plan, Stop, graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

from dynoffload.memory.pager import probe

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adamw fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
    "sgd": lambda p: SGD(p, lr=1e-1, momentum=0.9),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3, centered=True),
}
CASES: dict[str, Any] = {
    "plan": graphs(),
    "optimizer": st.sampled_from(list(OPTIMIZERS)),
    "share": st.floats(0.05, 1.2),
    "backend": st.just("mapped") if probe() else st.sampled_from(["pager", "pager", "mapped"]),
    "page": st.sampled_from([4096, 8192]),
    "aside": st.booleans(),
    "autocast": st.booleans(),
    "lies": st.none() | st.lists(st.lists(st.integers(-3, 20), max_size=12), max_size=3),
    "seed": st.integers(0, 1000),
}
HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large]


def live(
    model: nn.Module, optimizer: Optimizer, day: str, number: int, autocast: bool
) -> list[Any]:
    """Train one day, and return what was seen."""
    assert isinstance(model, Graph)
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(int(torch.randint(3, 40, (), generator=generator)), WIDTH, generator=generator)
    torch.manual_seed(number)
    seen: list[Any] = []

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float().square().mean()

    def descend(loss: Tensor, **options: Any) -> None:
        if loss.requires_grad:  # else no weight was met
            loss.backward(**options)

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
        state, its = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        descend(loss_of(x))
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(state)
        optimizer.load_state_dict(its)
    if day == "weights moved":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
    loss = loss_of(x)
    reentrant = any(node.kind == "reentrant" for node in model.plan.nodes)  # which refuses grad()
    if day == "gradient penalty" and loss.requires_grad and not (autocast or reentrant):
        weights = [layer.weight for layer in model.layers]
        found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        loss = loss + sum(
            (g.square().sum() for g in found if g is not None and g.requires_grad),
            start=torch.zeros(()),
        )
    descend(loss, retain_graph=day == "retained")
    if day == "retained":
        descend(loss)
    if day == "two backwards":
        descend(loss_of(x * 2))
    seen.append(loss.detach())
    if day == "gradients read":
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    if day != "no step":
        optimizer.step()
    optimizer.zero_grad(set_to_none=day != "zeroed in place")
    return seen


def check(
    plan: Plan,
    optimizer: str,
    share: float,
    backend: str,
    page: int,
    aside: bool,
    autocast: bool,
    lies: list[list[int]] | None,
    seed: int,
) -> None:
    """Live the days of a plan twice, and compare."""
    if autocast and any(node.kind in ("function", "reentrant") for node in plan.nodes):
        autocast = False  # these mix dtypes themselves
    twin = Twin(Graph(plan, seed), OPTIMIZERS[optimizer])
    config = {**SMALL_PAGES, "page_bytes": page, "min_paged_bytes": 512, "backend": backend}
    wanted = int(footprint_of(twin.model) * share)
    budget, _ = least_budget(twin.model, twin.optimizer, wanted, config)
    pilot = None if lies is None else LyingPilot(twin.model, lies)
    config["step_aside"] = aside
    days = [*plan.days, "plain"]
    expected = [live(twin.reference, twin.its, d, n, autocast) for n, d in enumerate(days)]
    with twin.paged(budget, pilot=pilot, config=config) as session:
        for number, day in enumerate(days):
            found = live(twin.model, twin.optimizer, day, number, autocast)
            assert_same(found, expected[number], f"day {number}, {day}")
    twin.assert_same()
    for step in session.log.steps:
        assert step.peak_fast_bytes <= budget, f"step {step.step} took {step.peak_fast_bytes} bytes"


@settings(max_examples=150, deadline=None, suppress_health_check=HEALTH)
@given(**CASES)
def test_no_graph_changes_a_bit(**case: Any) -> None:
    """A hundred and fifty lives."""
    check(**case)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=HEALTH)
@given(**CASES)
def test_none_of_thousands_of_graphs_changes_a_bit(**case: Any) -> None:
    """The same at length."""
    check(**case)
