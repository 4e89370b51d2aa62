"""Backward is planned where activation checkpointing computes segments of the forward again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import Loop, Mlp, Twin, batch, compare_runs, needs_pager
from fused_networks import mixtral, mixtral_loss, paging_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import dynoffload
from dynoffload.runtime.migration.migrator import Migrator, Phase

PAGES: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": 4096, "policy": "repeat"}


class Checkpointed(nn.Module):
    """Blocks of two layers, each computed again: one by one, twice in a row, or two at a time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.Sequential(*(Mlp(depth=1, classes=64) for _ in range(6)))
        self.head = nn.Linear(64, 10)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        if self.how == "two at a time":
            x = checkpoint_sequential(self.blocks, 3, x, use_reentrant=False)
        else:
            for block in self.blocks:
                for _ in range(1 + (self.how == "twice")):
                    x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def _loss(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


def _counts(migrator: Migrator) -> tuple[int, int]:
    return migrator.anchored, migrator.missed


@needs_pager
@pytest.mark.parametrize("how", ["", "reentrant", "twice", "two at a time"])
def test_every_use_of_a_backward_that_recomputes_is_in_its_plan(how: str) -> None:
    """From the second step on; after the first it is known which units run again."""
    torch.manual_seed(0)
    model = Checkpointed(how)
    optimizer = SGD(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=200_000, config=PAGES) as session:
        migrator = paging_of(session).migrator
        for step in range(4):
            loss = _loss(model, step)
            anchored, missed = _counts(migrator)
            loss.backward()
            assert migrator.phase is Phase.BACKWARD
            anchored, missed = migrator.anchored - anchored, migrator.missed - missed
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                again = 24 if how == "twice" else 12
                assert missed == 0
                assert anchored >= 2 * again  # as it is computed again, and as it is gone through
        assert session.stats["bytes_in"].iloc[-1] > 0


@needs_pager
@pytest.mark.parametrize("how", ["reentrant", "twice", "two at a time"])
def test_such_plans_change_no_bit(how: str) -> None:
    torch.manual_seed(0)
    twin = Twin(Checkpointed(how), lambda p: SGD(p, lr=1e-2))
    session = compare_runs(twin, Loop(steps=6), list(range(6)), _loss, 200_000, config=PAGES)
    assert session.stats["prefetched_bytes"].iloc[-1] > 0


@needs_pager
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_that_are_hit_again_are_in_the_plan(implementation: str) -> None:
    """Those of a call are read at once, or one by one."""
    model = mixtral(implementation, num_hidden_layers=4)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_()  # type: ignore[union-attr]
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=400_000, config=PAGES) as session:
        migrator = paging_of(session).migrator
        for step in range(4):
            loss = mixtral_loss(model, 0)
            _, missed = _counts(migrator)
            loss.backward()
            if step >= 2:
                assert migrator.missed == missed
            optimizer.step()
            optimizer.zero_grad()


@needs_pager
def test_a_network_that_no_longer_recomputes_is_planned_as_it_runs() -> None:
    """What the last backward did not compute again is not expected in the next."""
    torch.manual_seed(0)
    model = Checkpointed("")
    optimizer = SGD(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=200_000, config=PAGES) as session:
        migrator = paging_of(session).migrator
        for step in range(6):
            if step == 3:
                model.forward = lambda x: model.head(model.blocks(F.gelu(model.first(x))))  # type: ignore[method-assign]
            _loss(model, step).backward()
            assert migrator.recomputes is (0 < step < 4)
            optimizer.step()
            optimizer.zero_grad()
