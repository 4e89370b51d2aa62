"""Optimizers whose update of one parameter depends on which others are updated with it.

SGD with momentum and ``foreach`` scales the momentum of all parameters together where each has
some, else one by one, and in half precision the two round differently. Paged parameters are updated
one by one; the bits must be those of the step as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, Twin, footprint_of, needs_pager
from fused_networks import PAGES, Chosen
from hazards import hazard, trained
from torch import Tensor, nn
from torch.optim import SGD

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]
HALVES = [torch.bfloat16, torch.float16]


class Experts(nn.Module):
    """Layers of which a sample names those it goes through."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.small = nn.Parameter(torch.randn(32, generator=generator))
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        for layer in self.layers:
            layer.weight.data.normal_(0.0, 0.3, generator=generator)

    def forward(self, x: Tensor, hit: list[int]) -> Tensor:
        """Return activations ``[rows, 32]`` of inputs of that form."""
        x = x * self.small
        for number in hit:
            x = x + torch.tanh(self.layers[number](x))
        return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}], ids=str)
def test_first_gradients_come_late(
    options: dict[str, float], dtype: torch.dtype, backend: str
) -> None:
    """Two experts get their first gradient when the others have momentum; one small parameter stays
    in memory."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        hit = [0] if number < 3 else [0, 1] if number < 5 else [0, 2]
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        loss: Tensor = model(x.to(dtype), hit).float().square().mean()
        return loss

    def sgd(parameters: Iterable[nn.Parameter]) -> SGD:
        return SGD(parameters, lr=0.05, momentum=0.9, foreach=True, **options)  # type: ignore[arg-type]

    twin = Twin(Experts().to(dtype), sgd)
    config = {**SMALL_PAGES, "backend": backend, "step_aside": False}
    with twin.paged(footprint_of(twin.model), config=config):
        twin.train(loss_of, range(8))
    twin.assert_same()


@pytest.mark.parametrize("backend", [*BACKENDS, "emulated"])
def test_a_whole_parameter_joins_slices(backend: str) -> None:
    """What is paged by slices, and larger than the budget, has momentum; a layer has none yet."""

    class Late(Chosen):
        def __init__(self) -> None:
            super().__init__(48, 128)
            self.late = nn.Parameter(torch.full((128, 128), 0.1))

    def loss_of(model: Any, number: int) -> Tensor:
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(number))
        hit = [number % 48, (3 * number + 1) % 48]
        loss: Tensor = model(x.to(model.head.dtype), hit).float().square().mean()
        return loss if number < 3 else loss + (model.late.float() * number).square().mean()

    def sgd(parameters: Iterable[nn.Parameter]) -> SGD:
        return SGD(parameters, lr=0.05, momentum=0.9, foreach=True, weight_decay=0.1)

    def make() -> nn.Module:
        return Late().to(torch.bfloat16)

    options = {"loss": loss_of, "optimizer": sgd, "steps": 6, "share": 0.3, "states": 1, **PAGES}
    hazard(backend, trained(make, **options))
