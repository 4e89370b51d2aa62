"""Hazard: forward runs again in backward (`torch.utils.checkpoint`).

The graph: blocks of a router, experts and dropout, each checkpointed, so that backward calls their
modules anew: the same experts must be taken and the same elements dropped. Recomputed modules are
visited out of any planned order, save activations where no forward of the root is running, and read
parameters whose update may be pending. Reentrant (a backward within backward) and not (a
saved-tensor hook of its own), nested, and selective.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hazards import (
    Side,
    batch,
    each_backend,
    each_backend_in_time,
    hazard,
    loss_of,
    stepwise,
    trained,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)


class Experts(nn.Module):
    """Top 2 of 4 by noisy gates, with dropout; notes which were taken."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.taken: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        scores = scores + torch.randn_like(scores)
        weights, chosen = scores.softmax(-1).topk(2, -1)
        self.taken.append(chosen.flatten().tolist())
        out = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            part = F.gelu(self.experts[index](x[rows])) * weights[rows, place, None]
            out = out.index_add(0, rows, part.to(out.dtype))
        return x + F.dropout(out, 0.2)


class Checkpointed(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(64, 10)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how.get("use_reentrant"):
            x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return self.head(x)


def _products_kept(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


HOW: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(_products_kept),
    },
    "to the end": {"use_reentrant": False, "early_stop": False},
}


@stepwise(each_backend_in_time, lambda how: Checkpointed(**HOW[how]))
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_recompute_takes_the_same_experts(
    side: Side, model: Any, optimizer: Any, step: int, how: str, autocast: bool
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model, step)
    side.step(loss, optimizer)
    for block in model.blocks:
        first, *again = block.taken
        assert all(taken == first for taken in again)
        side.see("taken", block.taken)
        block.taken.clear()


@each_backend_in_time
@pytest.mark.parametrize("reentrant", [True, False])
def test_without_the_generators_state(backend: str, reentrant: bool) -> None:
    """``preserve_rng_state=False``: other numbers are drawn in backward, the same as plainly."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for layer in self.layers:
                x = checkpoint(
                    lambda x, layer=layer: F.dropout(layer(x).tanh(), 0.3),
                    x,
                    use_reentrant=reentrant,
                    preserve_rng_state=False,
                )
            return x

    hazard(backend, trained(Noisy, loss=lambda model, step: model(batch(step)[0]).square().mean()))


@each_backend_in_time
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_a_row_and_nested(backend: str, reentrant: bool) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(64, 64), nn.Linear(64, 64)
            parts = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.Tanh())]
            self.row = nn.Sequential(*parts)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.both, x.requires_grad_(), use_reentrant=reentrant)
            return checkpoint_sequential(self.row, 3, x, use_reentrant=reentrant)

        def both(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.outer(x))
            return checkpoint(lambda x: torch.tanh(self.inner(x)), x, use_reentrant=reentrant)

    hazard(backend, trained(Nested, loss=lambda model, step: model(batch(step)[0]).square().mean()))


@stepwise(each_backend, lambda: nn.Sequential(Experts(), Experts(), nn.Linear(64, 10)))
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_root_inside_a_checkpoint(
    side: Side, model: Any, optimizer: Any, step: int, reentrant: bool
) -> None:
    """The whole managed model is recomputed: its forward runs within backward."""
    x, y = batch(step)
    out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
    side.step(F.cross_entropy(out, y), optimizer)


@stepwise(each_backend_in_time, lambda reentrant: Checkpointed(use_reentrant=reentrant), steps=6)
@pytest.mark.parametrize("reentrant", [True, False])
def test_accumulation_over_checkpoints(
    side: Side, model: Any, optimizer: Any, step: int, reentrant: bool
) -> None:
    """A block's gradient is complete before the next micro-batch recomputes it."""
    for part in range(3):
        (loss_of(model, 10 * step + part) / 3).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    side.see("taken", [block.taken for block in model.blocks])
