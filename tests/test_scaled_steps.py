"""Updates that wait from a plain step are not those of the `GradScaler` step that follows.

A scaler hands its scale, and whether a gradient is infinite, to the optimizer for one step; fused
optimizers use them, and skip a step that is. Updates put off by an earlier step must not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused_networks import PAGES, Chosen, chosen_loss
from hazards import Mlp, Side, each_paged, hazard, loss_of
from torch import Tensor, nn
from torch.optim import AdamW

scaled = pytest.mark.parametrize(("drafts", "last"), [(0.0, "scaled"), (1.0, "overflows")])


def train(
    side: Side, model: nn.Module, drafts: float, last: str, loss_of: Callable[[int], Tensor]
) -> None:
    """Make a plain step, one that is scaled, or overflows and is skipped, and another plain one."""
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with side.offload(model, optimizer, share=0.5, draft_share=drafts, **PAGES):
        for number, kind in enumerate(("plain", last, "plain")):
            if kind == "plain":
                loss_of(number).backward()
                optimizer.step()
            else:
                loss = loss_of(number) * (float("inf") if kind == "overflows" else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()


@each_paged
@scaled
def test_with_experts_that_wait(backend: str, drafts: float, last: str) -> None:
    """Fused experts, of which the scaled step hits one."""
    hits = [[0, 1, 2, 3, 4, 5], [2], [3]]

    def program(side: Side) -> None:
        model = Chosen()
        train(side, model, drafts, last, lambda step: chosen_loss(model, (step, hits[step])))

    hazard(backend, program)


@each_paged
@scaled
def test_with_whole_parameters_that_get_no_gradient(backend: str, drafts: float, last: str) -> None:
    """Modules, of which the scaled step leaves some out."""

    def program(side: Side) -> None:
        model = Mlp()
        train(side, model, drafts, last, lambda step: loss_of(model.head if step else model, step))

    hazard(backend, program)
