"""Hazard: buffers that a module registers in its forward: a table made at first use, replaced,
deleted.

They were not there when the budget was divided. The graph saves one for backward, writes one in
place, and gives one up for another of a different size; one views memory of the user's or of numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from exactness import is_paged
from fused_networks import paging_of
from hazards import Side, batch, each_paged, stepwise
from torch import Tensor, nn


class Late(nn.Module):
    """Makes its tables at first use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            self.register_buffer("table", torch.ones(64, 64).cumsum(1))
            self.register_buffer("sum", torch.zeros(64, 64))
            self.register_buffer("tiny", torch.ones(3))
        if self.calls == 3:
            self.register_buffer("table", torch.ones(128, 64).cumsum(0))
        if self.calls == 4:
            del self.sum
            self.register_buffer("sum", torch.full((64, 64), 0.5), persistent=False)
        x = self.first(x) * self.table[: len(x)]
        with torch.no_grad():
            self.sum[: len(x)].add_(x.detach(), alpha=0.1)
        return self.second(x + self.sum[: len(x)]) * self.tiny.sum()


class Shares(Late):
    """One of its buffers views a tensor that it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == 0:
            self.keep = torch.ones(64, 64)
            self.register_buffer("part", self.keep[2:40])
        self.keep.mul_(1.5)
        return super().forward(x) * self.part[0]


class Table(nn.Module):
    """A buffer over memory that numpy writes, and one that is new in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.numbers = np.ones((64, 64), np.float32)
        self.register_buffer("last", torch.zeros(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.from_numpy(self.numbers))
        self.numbers *= 1.5
        self.last = torch.full((64, 64), float(x.detach().sum()))
        return self.layer(x) * self.table[: len(x)] + self.last[: len(x)]


def train(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    side.step(model(batch(step)[0]).square().mean(), optimizer)
    side.see("buffers", dict(model.named_buffers()))


@stepwise(each_paged, Late, steps=6, share=0.0)
def test_they_count_and_change_nothing(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Those of another model are no business of the session's."""
    train(side, model, optimizer, step)
    other = Late()
    other(batch(step)[0])
    for session, _ in side.sessions:
        assert is_paged(session, model.table)
        assert not is_paged(session, other.table)
        assert len(paging_of(session).adoption.buffers._tensors) == 2  # and their regions


@stepwise(each_paged, Shares, share=0.0, budgeted=False)
def test_what_somebody_else_holds_stays_where_it_is(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    train(side, model, optimizer, step)


@stepwise(each_paged, Table, share=0.0, budgeted=False, moves=False)
def test_memory_of_numpy_stays_numpys(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """What numpy writes is read; and regions do not pile up where no step ends."""
    train(side, model, optimizer, step)
    for number in range(5):
        with torch.no_grad():
            side.see("score", model(torch.full((4, 64), float(number))))
        for session, _ in side.sessions:
            assert len(paging_of(session).adoption.buffers._tensors) <= 2
