"""Buffers that a module registers in its forward: a table made at first use, replaced, deleted.

They were not there when the budget was divided. The graph saves one for backward, writes one in
place, and gives one up for another of a different size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exactness import SMALL_PAGES, Twin, assert_same, least_budget, needs_pager
from torch import Tensor, nn
from torch.optim import AdamW

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]


class Late(nn.Module):
    """Makes its tables at first use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.calls = 0
        self.keep: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            self.register_buffer("table", torch.ones(64, 32).cumsum(1))
            self.register_buffer("sum", torch.zeros(64, 32))
            self.register_buffer("tiny", torch.ones(3))
        if self.calls == 3:
            self.register_buffer("table", torch.ones(128, 32).cumsum(0))
        if self.calls == 4:
            del self.sum
            self.register_buffer("sum", torch.full((64, 32), 0.5), persistent=False)
        x = self.first(x) * self.table[: len(x)]
        with torch.no_grad():
            self.sum[: len(x)].add_(x.detach(), alpha=0.1)
        return self.second(x + self.sum[: len(x)]) * self.tiny.sum()


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Return the loss of a step."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(number))
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_count_and_change_nothing(backend: str) -> None:
    """The budget holds, and the bits are those of plain training, inside and after."""
    torch.manual_seed(0)
    twin = Twin(Late(), lambda p: AdamW(p, lr=1e-2))
    budget, _ = least_budget(twin.model, twin.optimizer, 1024, SMALL_PAGES)
    with twin.paged(budget, pilot=None, config={"backend": backend}) as session:
        for number in range(6):
            twin.train(loss_of, [number])
            assert_same(twin.model.state_dict(), twin.reference.state_dict(), f"step {number}")
        assert session.stats["peak_fast_bytes"].max() <= budget
        paging = session._paging
        assert paging is not None
        assert len(paging.adoption.buffers._tensors) == 2  # the others are gone, and their regions
    twin.assert_same()
    twin.train(loss_of, [9])
    twin.assert_same()


def test_what_somebody_else_holds_stays_where_it_is() -> None:
    """A buffer that views another tensor, and one whose view was taken before."""

    class Shares(Late):
        def forward(self, x: Tensor) -> Tensor:
            if self.calls == 0:
                whole = torch.ones(64, 32)
                self.keep = whole
                self.register_buffer("part", whole[2:40])
            assert self.keep is not None
            self.keep.mul_(1.5)
            part: Any = self.part
            return super().forward(x) * part[0]

    torch.manual_seed(0)
    twin = Twin(Shares(), lambda p: AdamW(p, lr=1e-2))
    budget, _ = least_budget(twin.model, twin.optimizer, 1024, SMALL_PAGES)
    with twin.paged(budget, pilot=None):
        twin.train(loss_of, range(3))
    twin.assert_same()


class Table(nn.Module):
    """A buffer over memory that somebody else writes, and one that is new in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.numbers = np.ones((32, 32), np.float32)
        self.register_buffer("last", torch.zeros(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.from_numpy(self.numbers))
        self.numbers *= 1.5
        self.last = torch.full((32, 32), float(x.detach().sum()))
        return self.layer(x) * self.table[: len(x)] + self.last[: len(x)]


def test_memory_of_numpy_stays_numpys() -> None:
    """What numpy writes is read."""
    torch.manual_seed(0)
    twin = Twin(Table(), lambda p: AdamW(p, lr=1e-2))
    budget, _ = least_budget(twin.model, twin.optimizer, 1024, SMALL_PAGES)
    with twin.paged(budget, pilot=None):
        twin.train(loss_of, range(3))
    twin.assert_same()


def test_regions_do_not_pile_up_in_evaluation() -> None:
    """Each forward replaces the buffer, and no step ends meanwhile."""
    torch.manual_seed(0)
    twin = Twin(Table(), lambda p: AdamW(p, lr=1e-2))
    budget, _ = least_budget(twin.model, twin.optimizer, 1024, SMALL_PAGES)
    with twin.paged(budget, pilot=None) as session:
        paging = session._paging
        assert paging is not None
        for number in range(20):
            with torch.no_grad():
                for model in (twin.model, twin.reference):
                    model(torch.full((4, 32), float(number)))
            assert len(paging.adoption.buffers._tensors) <= 2
    twin.assert_same()


def test_other_models_keep_theirs() -> None:
    """Only modules of the managed model are looked at."""
    twin = Twin(Late(), lambda p: AdamW(p, lr=1e-2))
    budget, _ = least_budget(twin.model, twin.optimizer, 1024, SMALL_PAGES)
    with twin.paged(budget) as session:
        twin.train(loss_of, [0])
        assert session._paging is not None
        assert session._paging.device.owner(twin.model.table) >= 0
        assert session._paging.device.owner(twin.reference.table) < 0
