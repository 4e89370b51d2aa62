"""Updates that wait from a plain step are not those of the `GradScaler` step that follows.

A scaler hands its scale, and whether a gradient is infinite, to the optimizer for one step; fused
optimizers use them, and skip a step that is. Updates put off by an earlier step must not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import (
    Twin,
    footprint_of,
    least_budget,
    needs_pager,
    small,
    small_loss,
    small_samples,
)
from fused_networks import PAGES, Chosen, chosen_loss
from torch import nn
from torch.optim import AdamW

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]
EVERY = [0, 1, 2, 3, 4, 5]


def train(model: nn.Module, optimizer: Any, kinds: list[str], losses: list[Any]) -> None:
    """Make one step of each kind: plain, scaled, or one that overflows and is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for kind, loss_of in zip(kinds, losses, strict=True):
        loss = loss_of(model)
        if kind == "plain":
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss * (float("inf") if kind == "overflows" else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(("drafts", "last"), [(0.0, "scaled"), (1.0, "overflows")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_experts_that_wait(backend: str, drafts: float, last: str) -> None:
    """Fused experts, of which the scaled step hits one."""
    torch.manual_seed(0)
    twin = Twin(Chosen(), lambda p: AdamW(p, lr=1e-2, fused=True))
    losses = [
        lambda model: chosen_loss(model, (0, EVERY)),
        lambda model: chosen_loss(model, (1, [2])),
        lambda model: chosen_loss(model, (2, [3])),
    ]
    config = {**PAGES, "backend": backend, "draft_share": drafts}
    with twin.paged(footprint_of(twin.model) // 2, pilot=None, config=config):
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            train(model, optimizer, ["plain", last, "plain"], losses)
    twin.assert_same()


@pytest.mark.parametrize("last", ["scaled", "overflows"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_whole_parameters_that_get_no_gradient(backend: str, last: str) -> None:
    """Modules, of which the scaled step leaves some out."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2, fused=True))
    samples = small_samples(4)

    def part(model: Any) -> Any:
        return model.head(model.norm(model.embedding(samples[1][0]))).square().mean()

    losses = [lambda model: small_loss(model, samples[0]), part, part]
    budget, _ = least_budget(
        twin.model, twin.optimizer, footprint_of(twin.model) // 2, {"page_bytes": 4096}
    )
    with twin.paged(budget, pilot=None, config={"backend": backend}):
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            torch.manual_seed(0)
            train(model, optimizer, ["plain", last, "plain"], losses)
    twin.assert_same()
