"""Hazard: modules and parameters added, replaced and deleted in mid-run.

The graph: linear layers of which one is replaced by a new one, one is deleted, one is added, one is
wrapped by an adapter, two trade places, and one gets a new parameter, while updates wait. What is
new is paged from the next sample on.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hazards import (
    Mlp,
    Side,
    batch,
    each_backend,
    each_backend_in_time,
    each_paged,
    hazard,
    loss_of,
)
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.errors import BudgetError, ConfigError


def _replaced(model: Mlp, optimizer: Optimizer) -> None:
    model.layers[1] = nn.Linear(64, 64)
    optimizer.add_param_group({"params": model.layers[1].parameters()})


def _replaced_parameter(model: Mlp, optimizer: Optimizer) -> None:
    old = model.layers[1].weight
    model.layers[1].weight = nn.Parameter(old.detach().clone() * 0.5)
    (group,) = optimizer.param_groups
    group["params"] = [model.layers[1].weight if p is old else p for p in group["params"]]
    optimizer.state[model.layers[1].weight] = optimizer.state.pop(old)


def _deleted(model: Mlp, optimizer: Optimizer) -> None:
    del model.layers[2]


def _deleted_everywhere(model: Mlp, optimizer: Optimizer) -> None:
    gone = set(model.layers[2].parameters())
    del model.layers[2]
    (group,) = optimizer.param_groups
    group["params"] = [p for p in group["params"] if p not in gone]
    for parameter in gone:
        optimizer.state.pop(parameter, None)


def _added(model: Mlp, optimizer: Optimizer) -> None:
    more = [nn.Linear(64, 64) for _ in range(4)]
    model.layers.extend(more)
    optimizer.add_param_group({"params": [p for layer in more for p in layer.parameters()]})


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 16, bias=False), nn.Linear(16, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _wrapped(model: Mlp, optimizer: Optimizer) -> None:
    for index in (0, 2):
        model.layers[index] = adapted = Adapted(model.layers[index])
        new = [*adapted.down.parameters(), *adapted.up.parameters()]
        optimizer.add_param_group({"params": new})


def _traded(model: Mlp, optimizer: Optimizer) -> None:
    layers = model.layers
    layers[0], layers[3] = layers[3], layers[0]


def _grown(model: Mlp, optimizer: Optimizer) -> None:
    """An embedding-like layer is resized: the head gets more rows."""
    old, model.head = model.head, nn.Linear(64, 20)
    with torch.no_grad():
        model.head.weight[:10] = old.weight
    optimizer.add_param_group({"params": model.head.parameters()})


SURGERY: dict[str, Callable[[Mlp, Optimizer], None]] = {
    "a module replaced": _replaced,
    "a parameter replaced": _replaced_parameter,
    "deleted": _deleted,
    "deleted everywhere": _deleted_everywhere,
    "added": _added,
    "wrapped": _wrapped,
    "traded": _traded,
    "grown": _grown,
}


@each_backend_in_time
@pytest.mark.parametrize("surgery", SURGERY)
def test_surgery_in_mid_run(backend: str, surgery: str) -> None:
    def program(side: Side) -> None:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        with side.offload(model, optimizer):
            for step in range(7):
                if step == 3:
                    SURGERY[surgery](model, optimizer)
                side.step(loss_of(model, step), optimizer)

    hazard(backend, program, aside=surgery not in ("a module replaced", "deleted", "grown"))


@each_backend
def test_what_is_new_is_paged(backend: str) -> None:
    """Ten layers are added to five, under a budget for five."""

    def program(side: Side) -> None:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        with side.offload(model, optimizer):
            for step in range(5):
                side.step(loss_of(model, step), optimizer)
                if step == 1:
                    model.layers.extend(nn.Linear(64, 64, bias=False) for _ in range(10))
                    new = [p for layer in model.layers[5:] for p in layer.parameters()]
                    optimizer.add_param_group({"params": new})

    hazard(backend, program)


@each_paged
def test_each_of_several_changes_is_paged(backend: str) -> None:
    """One layer after another: what is new is found, and read, each time."""

    def program(side: Side) -> None:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        with side.offload(model, optimizer) as session:
            for step in range(6):
                if step in (1, 2, 4):
                    model.layers.append(nn.Linear(64, 64))
                    optimizer.add_param_group({"params": model.layers[-1].parameters()})
                loss = loss_of(model, step)
                if session is not None:
                    assert session._paging is not None
                    owner = session._paging.device.owner
                    assert all(owner(layer.weight.data_ptr()) >= 0 for layer in model.layers)
                side.step(loss, optimizer)

    hazard(backend, program)


@each_paged
def test_of_what_does_not_fit_together_nothing_is_adopted(backend: str) -> None:
    """Two layers are added, of which the second is too large; without it the first is paged."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with Side(backend).offload(model, optimizer) as session:
        assert session is not None
        assert session._paging is not None
        owner = session._paging.device.owner
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.layers.append(nn.Linear(64, 64))
        model.too_large = nn.Linear(64, 4096)
        optimizer.add_param_group({"params": model.layers[-1].parameters()})
        for _ in range(2):
            with pytest.raises(
                BudgetError, match=r"too_large\.weight, which was added to the model"
            ):
                loss_of(model, 1)
            assert owner(model.layers[-1].weight.data_ptr()) < 0
        del model.too_large
        loss_of(model, 1).backward()
        assert owner(model.layers[-1].weight.data_ptr()) >= 0
        gradient = model.layers[-1].weight.grad
        assert gradient is not None
        assert owner(gradient.data_ptr()) >= 0
        optimizer.step()


@pytest.mark.parametrize("kind", [nn.LazyLinear, nn.LazyBatchNorm1d])
def test_a_lazy_module_is_told_the_remedy(kind: Callable[..., nn.Module]) -> None:
    lazy = kind(64) if kind is nn.LazyLinear else kind()
    model = nn.Sequential(nn.Linear(64, 64), lazy)
    with (
        pytest.raises(ConfigError, match=r"'1\.weight' of a lazy module has no shape yet: call"),
        dynoffload.offload(model, budget="1 MiB"),
    ):
        pass
    with torch.no_grad():
        model(batch(0)[0])
    with dynoffload.offload(model, budget="1 MiB"):
        model(batch(0)[0]).sum().backward()
