"""Small modules are one unit with their submodules, where these run together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import Loop, Twin, compare_runs, needs_pager
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from dynoffload.planning.small_modules import nests
from dynoffload.runtime.session import Session
from dynoffload.runtime.updates.pending import PendingUpdates


class Pair(nn.Module):
    """Two layers, or one of its own and one of others', too."""

    def __init__(self, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), second or nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return self.second(self.first(x).relu())


class Net(nn.Module):
    """Two pairs, which share a layer or not; the second's layers are called one by one."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        layer = nn.Linear(32, 32) if shared else None
        self.one, self.two = Pair(layer), Pair(layer)
        self.chosen = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        x = self.two.second(self.two.first(self.one(x)))
        return self.chosen[0](x)


def trained(model: nn.Module, budget: int = 120_000, make: Any = AdamW, **options: Any) -> Session:
    """Train a model in two copies, and compare."""
    pair = Twin(model, lambda p: make(p, lr=1e-2))
    samples = [torch.randn(4, 32) for _ in range(5)]
    options = {"pilot": None, **options}
    return compare_runs(
        pair, Loop(steps=5), samples, lambda m, x: m(x).square().sum(), budget, **options
    )


def test_what_may_be_one_unit() -> None:
    """Neither the root, nor what holds a list, nor what has a layer of others', too."""
    members = {"one": ("one.first", "one.second"), "two": ("two.first", "two.second")}
    assert nests(Net(shared=False)) == members
    assert nests(Net(shared=True)) == {}


@needs_pager
def test_a_layer_of_two_modules() -> None:
    trained(Net(shared=True))


@needs_pager
def test_layers_that_run_without_their_module_are_units_of_their_own() -> None:
    """From the second step on; before, their updates would be made as accesses wait for them."""
    torch.manual_seed(0)
    pair = Twin(Net(shared=False), lambda p: AdamW(p, lr=1e-2))
    with pair.paged(400_000) as session:
        paging = session._paging
        assert paging is not None
        found = []
        for seed in range(3):
            for model, optimizer in pair.sides:
                torch.manual_seed(seed)
                model(torch.randn(4, 32)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([unit.path for unit in paging.migrator.last_order])
        assert found[0] == ["one", "chosen.0"]
        assert found[2] == ["one", "two.first", "two.second", "chosen.0"]
    pair.assert_same()


@pytest.mark.parametrize("makes_state", [True, False])
def test_updates_of_a_unit_are_one_call_once_they_have_state(
    makes_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New state is in no region until its update is made: that of one parameter at a time."""
    calls: list[tuple[int, int]] = []  # weights, and those without state
    run = PendingUpdates.run

    def seen(self: PendingUpdates, groups: Any, state: Any) -> None:
        weights = [p for group in groups for p in group["params"] if p.dim() > 1]
        calls.append((len(weights), sum(not state.get(p) for p in weights)))
        run(self, groups, state)

    monkeypatch.setattr(PendingUpdates, "run", seen)
    make = AdamW if makes_state else SGD
    with accelerated():
        budget = 200_000 if makes_state else 100_000
        trained(nn.Sequential(*(Pair() for _ in range(8))), budget, make, device=DEVICE)
    assert (2, 0 if makes_state else 2) in calls
    assert not makes_state or {count for count, new in calls if new} == {1}
