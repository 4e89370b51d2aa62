"""SGD in half precision rounds by which other parameters have momentum, and so do we.

With ``foreach`` it scales all momentum of a dtype at once if every parameter has some, and else one
by one, which rounds otherwise. So a parameter's update depends on whether another one has its first
gradient in the same step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_networks import PAGES, Chosen
from hazards import each_with_slices_in_time, hazard, trained
from slice_cases import HITS
from torch import Tensor, nn
from torch.optim import SGD

HALVES = [torch.bfloat16, torch.float16]


class Late(Chosen):
    """Experts in one parameter, and matrices that are used from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.ParameterList(torch.full((32, 32), 0.1) for _ in range(2))


def late_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a step, which brings first gradients in the third and in the fifth."""
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
    loss = model(x.to(model.head.dtype), HITS[step]).float().square().mean()  # type: ignore[arg-type]
    late = list(model.late)[: (step >= 2) + (step >= 4)]  # type: ignore[arg-type]
    return loss + sum((one.float() * step).square().mean() for one in late)


@each_with_slices_in_time
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("slices", [True, False])
def test_first_gradients_come_late(
    backend: str, dtype: torch.dtype, options: dict[str, Any], slices: bool
) -> None:
    """Beside experts that have momentum, in one region or by slices."""

    def make() -> nn.Module:
        return Late().to(dtype)

    def sgd(parameters: Any) -> SGD:
        return SGD(parameters, lr=0.05, momentum=0.9, foreach=True, **options)

    program = trained(
        make, loss=late_loss, optimizer=sgd, steps=7, share=0.5, states=1, slices=slices, **PAGES
    )
    hazard(backend, program)
