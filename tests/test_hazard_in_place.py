"""Hazard: parameters and buffers that are written in place while updates wait.

The graph: an exponential moving average of the weights, kept in a model or in lists; weight norm
and spectral norm, old and by parametrization; batch norm's running statistics; weights clamped,
scaled and initialised anew between steps; buffers that forward writes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import HOME
from hazards import Mlp, Side, compared, each_backend, loss_of, stepwise
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn


@compared(each_backend)
@pytest.mark.parametrize("foreach", [False, True])
def test_averaged_model(side: Side, foreach: bool) -> None:
    """`AveragedModel` copies the managed model, and reads it by foreach kernels or one by one."""
    with side.block() as (model, optimizer):
        how = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if foreach else {}
        average = AveragedModel(model, **how)
        for step in range(5):
            side.step(loss_of(model, step), optimizer)
            average.update_parameters(model)
        side.see_state(average)
    side.see_state(average)


@compared(each_backend, aside=False)
def test_the_average_trades_places_with_the_weights(side: Side) -> None:
    """Evaluation by the averaged weights: `.data` of all parameters is exchanged and put back."""
    model = Mlp().to(HOME)
    average = copy.deepcopy(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def trade() -> None:
        for ours, theirs in zip(model.parameters(), average.parameters(), strict=True):
            ours.data, theirs.data = theirs.data, ours.data

    with side.offload(model, optimizer):
        for step in range(6):
            side.step(loss_of(model, step), optimizer)
            with torch.no_grad():
                for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(now, 0.5)
            trade()
            with torch.no_grad():
                side.see("score", loss_of(model, 100))
            trade()


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(*(norm(nn.Linear(64, 64)) for _ in range(4)), nn.Linear(64, 10))


class Symmetric(nn.Module):
    """A parametrization that reads its weight twice."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def symmetric() -> nn.Module:
    model = Mlp()
    for layer in model.layers:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    return model


class Counting(nn.Module):
    """Writes a large buffer in forward, and reads it there, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.register_buffer("memory", torch.zeros(8, 64))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.memory.mul_(0.9).add_(x, alpha=0.1)
        self.last = x.detach().clone()
        return self.inner(x + self.memory.clone())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    # The weight is made in forward, of two parameters; as a hook, before ours.
    "weight norm, by a hook": lambda: normed(torch.nn.utils.weight_norm),
    "weight norm": lambda: normed(parametrizations.weight_norm),
    # Their power iteration writes buffers in forward, which backward must not see changed.
    "spectral norm, by a hook": lambda: normed(torch.nn.utils.spectral_norm),
    "spectral norm": lambda: normed(parametrizations.spectral_norm),
    "a parametrization": symmetric,
    "buffers": Counting,
}


@stepwise(each_backend, lambda network: NETWORKS[network](), steps=5)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("network", NETWORKS)
def test_what_forward_makes_and_writes(side: Side, model: Any, optimizer: Any, step: int) -> None:
    side.step(loss_of(model, step), optimizer)


@stepwise(each_backend, symmetric)
def test_a_parametrization_that_is_cached(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    with parametrize.cached():
        loss = loss_of(model, step) + loss_of(model, step + 50)
    side.step(loss, optimizer)


@stepwise(each_backend, steps=5)
def test_a_parametrization_added_and_removed_in_mid_run(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Removing one writes the made weight into the parameter, by ``set_``."""
    side.step(loss_of(model, step), optimizer)
    if step == 1:
        parametrize.register_parametrization(model.layers[1], "weight", Symmetric())
    if step == 3:
        parametrize.remove_parametrizations(model.layers[1], "weight")


@compared(each_backend)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm(side: Side, momentum: float | None) -> None:
    """Running statistics and the count of batches are buffers that forward writes."""

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=momentum), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(64, 10))

    with side.block(make) as (model, optimizer):
        side.train(model, optimizer, range(5))
        update_bn([torch.randn(8, 64).to(HOME) for _ in range(3)], model)
        side.step(loss_of(model, 9), optimizer)


@stepwise(each_backend, steps=5)
def test_weights_written_between_steps(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Clamped, scaled, and one layer initialised anew; each after the update that waits."""
    side.step(loss_of(model, step), optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)
        model.layers[0].weight.div_(model.layers[0].weight.norm(dim=1, keepdim=True))
        torch._foreach_mul_([layer.weight for layer in model.layers[1:]], 0.999)
    if step == 2:
        model.layers[3].reset_parameters()
        nn.init.orthogonal_(model.layers[2].weight)
