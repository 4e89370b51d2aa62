"""Hazard: modules and parameters added, replaced and deleted in mid-run.

The graph: linear layers of which one is replaced by a new one, one is deleted, one is added, one is
wrapped by an adapter, two trade places, and one gets a new parameter, while updates wait. What is
new is paged from the next sample on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import HOME, is_paged
from hazards import (
    Mlp,
    Side,
    batch,
    compared,
    each_backend_in_time,
    each_paged,
    each_paged_in_time,
    loss_of,
    stepwise,
)
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.errors import BudgetError, ConfigError


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(64, 16, bias=False).to(HOME)
        self.up = nn.Linear(16, 64, bias=False).to(HOME)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def operate(surgery: str, model: Any, optimizer: Optimizer) -> list[nn.Parameter]:
    """Change the model, and the optimizer's first group; return what is new in the model."""
    layers, head, (group, *_) = model.layers, model.head, optimizer.param_groups
    before = set(model.parameters())
    match surgery:
        case "a module replaced":
            layers[1] = nn.Linear(64, 64).to(HOME)
        case "a parameter replaced":
            old = layers[1].weight
            layers[1].weight = new = nn.Parameter(old.detach().clone() * 0.5)
            group["params"] = [new if p is old else p for p in group["params"]]
            optimizer.state[new] = optimizer.state.pop(old)
            return []
        case "deleted":
            del layers[2]
        case "deleted everywhere":
            gone = set(layers[2].parameters())
            del layers[2]
            group["params"] = [p for p in group["params"] if p not in gone]
            for parameter in gone:
                optimizer.state.pop(parameter, None)
        case "added":
            layers.extend(nn.Linear(64, 64).to(HOME) for _ in range(4))
        case "wrapped":
            layers[0], layers[2] = Adapted(layers[0]), Adapted(layers[2])
        case "traded":
            layers[0], layers[3] = layers[3], layers[0]
        case "grown":  # as an embedding is resized: the head gets more rows
            model.head = nn.Linear(64, 20).to(HOME)
            with torch.no_grad():
                model.head.weight[:10] = head.weight
        case _:
            raise AssertionError(surgery)
    return [p for p in model.parameters() if p not in before]


SURGERY = (
    *("a module replaced", "a parameter replaced", "deleted", "deleted everywhere", "added"),
    *("wrapped", "traded", "grown"),
)


@stepwise(
    each_backend_in_time,
    steps=7,
    aside=lambda surgery: surgery not in ("a module replaced", "deleted", "grown"),
)
@pytest.mark.parametrize("surgery", SURGERY)
def test_surgery_in_mid_run(
    side: Side, model: Any, optimizer: Any, step: int, surgery: str
) -> None:
    if step == 3 and (new := operate(surgery, model, optimizer)):
        optimizer.add_param_group({"params": new})
    side.step(loss_of(model, step), optimizer)


def change(operation: str, layers: Any, new: list[nn.Module]) -> None:
    """Put new layers into a container by what it offers."""
    match operation:
        case "insert":
            for layer in new:
                layers.insert(1, layer)
        case "[] =":
            for index, layer in enumerate(new[:3]):
                layers[index] = layer
        case "del":
            del layers[2]
            del layers[0:1]
            layers.append(new[0])
        case "setattr":
            setattr(layers, "3", new[0])
        case "_modules":
            layers._modules["0"] = new[0]


class Listed(Mlp):
    """Keeps its layers in one of torch's containers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = kind(*self.layers) if kind is nn.Sequential else self.layers


@compared(each_paged_in_time)
@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("operation", ["insert", "[] =", "del", "setattr", "_modules"])
def test_what_containers_offer(side: Side, operation: str, kind: type[nn.Module]) -> None:
    """Some write their children themselves, of which torch tells nobody; the new layers were made
    before the block, of which nobody hears in it either."""
    new: list[nn.Module] = [nn.Linear(64, 64) for _ in range(8)]
    with side.block(lambda: Listed(kind)) as (model, optimizer):
        side.train(model, optimizer, range(2))
        before = set(model.parameters())
        change(operation, model.layers, new)
        added = [p for p in model.parameters() if p not in before]
        assert added
        optimizer.add_param_group({"params": added})
        side.train(model, optimizer, range(2, 5))
        for session, _ in side.sessions:
            assert all(is_paged(session, p) for p in model.parameters() if p.dim() == 2)


@compared(each_paged_in_time)
@pytest.mark.parametrize("count", [6, 40])
def test_small_parameters_of_what_is_added_find_room(side: Side, count: int) -> None:
    """The pool keeps its size. So first fewer saved tensors stay in memory beside it, then small
    parameters are paged too: every step keeps the budget to the byte."""
    with side.block() as (model, optimizer):
        side.train(model, optimizer, range(2))
        more = [nn.Linear(64, 64) for _ in range(count)]
        model.layers.extend(more)
        optimizer.add_param_group({"params": [p for one in more for p in one.parameters()]})
        side.train(model, optimizer, range(2, 5))
        for session, _ in side.sessions:
            biases = [p for p in model.parameters() if p.dim() == 1]
            assert any(is_paged(session, bias) for bias in biases) == (count > 6)


@each_paged
def test_what_cannot_be_paged_and_has_no_room_is_refused(backend: str) -> None:
    """A buffer of a new module, larger than what the budget has beside the pool."""
    side = Side(backend)
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer) as session:
        assert session is not None
        side.train(model, optimizer, range(2))
        model.table = nn.Linear(64, 64)
        model.table.register_buffer("mask", torch.zeros(1 << 16))
        for _ in range(2):
            with pytest.raises(
                BudgetError,
                match=r"table\.mask and others that cannot be paged have no room since the model "
                r"was changed: what stays in memory takes 2\d\d.* KiB and saved activations .*, "
                "and the budget has .* beside the pool: raise the budget, or change the model back",
            ):
                loss_of(model, 2)
            assert not is_paged(session, model.table.weight)
        del model.table
        side.train(model, optimizer, range(2, 4))
    assert all(row.peak_fast_bytes <= side.sessions[0][1] for row in session.log.steps)


@each_paged
def test_of_what_does_not_fit_together_nothing_is_adopted(backend: str) -> None:
    """Two layers are added, of which the second is too large; without it the first is paged."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with Side(backend).offload(model, optimizer) as session:
        assert session is not None
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
            assert not is_paged(session, model.layers[-1].weight)
        del model.too_large
        loss_of(model, 1).backward()
        assert is_paged(session, model.layers[-1].weight)
        gradient = model.layers[-1].weight.grad
        assert gradient is not None
        assert is_paged(session, gradient)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_torchscript_module_is_told_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(64, 64), torch.jit.script(nn.Linear(64, 64)))
    optimizer = AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"module '1' is TorchScript, which takes no hooks: put"):
        with dynoffload.offload(model, optimizer, budget="1 MiB"):
            pytest.fail("the block must not begin")


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


class Tables(Mlp):
    """Has sixteen buffers over one storage of 64 KiB."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        for number, part in enumerate(torch.zeros(16, 1024).unbind(0)):
            self.register_buffer(f"table{number}", part)


@stepwise(each_paged, Tables, share=0.85)
def test_buffers_of_one_storage_are_counted_once_when_a_layer_is_added(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    if step == 2:
        model.layers.append(nn.Linear(64, 64))
        optimizer.add_param_group({"params": model.layers[-1].parameters()})
    side.step(loss_of(model, step), optimizer)
