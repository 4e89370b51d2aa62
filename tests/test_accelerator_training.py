"""Training on an emulated accelerator: bitwise equal to plain PyTorch, whatever its queues do.

The device is the real one, over queues that are late at random and find every access that no
moment was waited for. A budget of host memory puts a file below it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import (
    SMALL_PAGES,
    Loop,
    Twin,
    assert_same,
    compare_runs,
    footprint_of,
    least_budget,
    small,
    small_loss,
    small_samples,
)
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import dynoffload
from dynoffload.managed import managers
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.session import Session
from dynoffload.runtime.updates.pending import PendingUpdates

CONFIG: dict[str, Any] = {**SMALL_PAGES, "step_aside": False}


def budget_for(twin: Twin, share: int) -> int:
    """Return a share of what training keeps, or what is refused least."""
    wanted = footprint_of(twin.model) // share
    return least_budget(twin.model, twin.optimizer, wanted, SMALL_PAGES)[0]


def mlp(width: int = 48, layers: int = 4) -> nn.Module:
    """Return a network without any dynamism."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    )


def mlp_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a loss of the network's output."""
    return model(x).square().mean()


@pytest.mark.parametrize("how", ["nobody", "parameters", "state", "gradients", "storages"])
def test_updates_wait_for_the_next_use(how: str) -> None:
    """Whose use it ever is: a forward's, or that of somebody who looks before it."""
    waited: list[int] = []
    looks: dict[str, Callable[[nn.Parameter, Optimizer], torch.Tensor | None]] = {
        "nobody": lambda p, optimizer: None,
        "parameters": lambda p, optimizer: p.detach().sum(),
        "state": lambda p, optimizer: optimizer.state[p]["exp_avg"].sum(),
        "gradients": lambda p, optimizer: None if p.grad is None else p.grad.sum(),
        "storages": lambda p, optimizer: torch.empty(0).set_(copy.deepcopy(p.untyped_storage())),
    }
    twin = Twin(small(), partial(AdamW, lr=1e-2))
    seen: dict[nn.Module, list[Any]] = {twin.model: [], twin.reference: []}

    def look(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if model is twin.model:
            waited.append(len(pending()))
        for parameter in list(model.parameters())[:4]:
            seen[model].append(looks[how](parameter, optimizer))

    with accelerated(elsewhere=True):
        compare_runs(
            twin,
            Loop(steps=4, peek=look, zero_first=True),
            small_samples(4),
            small_loss,
            budget_for(twin, 3),
            device=DEVICE,
        )
    assert_same(seen[twin.model], seen[twin.reference], "what was seen")
    assert min(waited) > 0


def pending() -> Any:
    """Return the updates that wait in the open block."""
    (session,) = managers.values()
    assert session._paging is not None
    assert session._paging.updates is not None
    return session._paging.updates.pending.by_slot


@pytest.mark.parametrize("roomy", [True, False])
def test_small_updates_whose_regions_are_there_are_made_together(roomy: bool) -> None:
    """By one call of the optimizer where a 32nd of the pool has room for them."""
    model = mlp(layers=6)
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=True)
    calls: list[int] = []
    run, make, within = PendingUpdates.run, PendingUpdates.make, list[int]()

    def counting(self: PendingUpdates, groups: list[Any], state: Any) -> None:
        calls.append(sum(len(group["params"]) for group in groups))
        run(self, groups, state)

    def alone(self: PendingUpdates, updates: Any) -> None:
        assert not within, "what one update makes, such as state, is not adopted before others"
        within.append(1)
        make(self, updates)
        within.pop()

    with (
        accelerated(),
        mock.patch.object(PendingUpdates, "run", counting),
        mock.patch.object(PendingUpdates, "make", alone),
    ):
        budget = footprint_of(model, 4) * (64 if roomy else 2)
        with dynoffload.offload(
            model, optimizer, budget=budget, pilot=None, device=DEVICE, config=CONFIG
        ):
            for _ in range(4):
                mlp_loss(model, torch.ones(2, 48)).backward()
                optimizer.step()
                optimizer.zero_grad()
                calls.clear()
            with torch.no_grad():
                model(torch.ones(2, 48))
    assert max(calls) == (6 if roomy else 1)


def test_counting_brings_nothing() -> None:
    """What a model takes is known of what is absent, too; counting is done at every step."""
    model, samples = mlp(), [torch.randn(8, 48) for _ in range(3)]
    optimizer = AdamW(model.parameters(), lr=1e-2)
    budget = least_budget(model, optimizer, footprint_of(model) // 4, CONFIG)[0]
    with (
        accelerated(elsewhere=True),
        dynoffload.offload(
            model, optimizer, budget=budget, device=DEVICE, config=CONFIG
        ) as session,
    ):
        Loop(steps=3).run(model, optimizer, samples, mlp_loss)
        session.flush()
        before = moved(session)
        counted = ordinary_bytes(model, optimizer)
        assert moved(session) == before
    assert counted >= footprint_of(model, 2) - sum(p.nbytes for p in model.parameters())


def moved(session: Session) -> tuple[int, int]:
    """Return the bytes that a session has moved so far."""
    assert session._paging is not None
    counters = session._paging.device.counters()
    return counters.bytes_in, counters.bytes_out


def test_an_operator_that_finds_no_memory_is_called_again() -> None:
    """Once what is not used has made way; not if it changes what it is given."""
    twin = Twin(mlp(), partial(AdamW, lr=1e-2, foreach=False))
    samples = [torch.randn(8, 48) for _ in range(6)]
    resident: list[int] = []
    with accelerated(elsewhere=True) as queues:

        def lack(step: int, model: nn.Module, optimizer: Optimizer) -> None:
            if model is twin.model:
                (session,) = managers.values()
                resident.append(session._paging.device.resident_bytes())
                queues.full_for |= {"aten.addmm.default", "aten.mm.default"}

        budget = budget_for(twin, 2)
        compare_runs(
            twin,
            Loop(steps=6, peek=lack),
            samples,
            mlp_loss,
            budget,
            device=DEVICE,
        )
        assert len(queues.full_for) == 2  # of the last step; all others were called again
    assert min(resident) > 0

    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)
    with (
        accelerated(elsewhere=True) as queues,
        dynoffload.offload(model, optimizer, budget=budget, device=DEVICE, config=CONFIG),
    ):
        mlp_loss(model, samples[0]).backward()
        queues.full_for.add("aten.add_.Tensor")
        with pytest.raises(torch.OutOfMemoryError, match=r"no memory for aten.add_"):
            model[0][0].weight.grad.add_(1.0)
