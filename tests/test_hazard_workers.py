"""Hazard: processes made while updates wait and pages are away.

The graph: a small network fed by `torch.utils.data.DataLoader` workers, forked or spawned, made
anew each epoch or kept; a forked child whose data set holds the managed model itself. A child has
none of the parent's paged memory and none of its threads; nothing of it may reach the parent.
"""

from __future__ import annotations

import pytest
import torch
from exactness import Samples, only, small, small_loss
from hazards import Side, each_backend, hazard
from torch.optim import AdamW
from torch.utils.data import DataLoader

pytestmark = pytest.mark.timeout(300)


@each_backend
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers(backend: str, method: str) -> None:
    if method == "spawn" and backend != "pager":
        pytest.skip("a spawned child shares nothing with the parent: one backend will do")

    def program(side: Side) -> None:
        model = small()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(7)
        with side.offload(model, optimizer):
            for _ in range(2 if method == "fork" else 1):
                loader = DataLoader(
                    Samples(),
                    shuffle=True,
                    num_workers=1,
                    collate_fn=only,
                    multiprocessing_context=method,
                    generator=generator,
                )
                for number, sample in enumerate(loader):
                    side.step(small_loss(model, sample), optimizer)
                    if number == 5:
                        break

    hazard(backend, program)
