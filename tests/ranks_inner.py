"""Ranks that save a model of which a part is a replica: no tests here."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dynoffload
from dynoffload.errors import CheckpointError


class Net(nn.Module):
    """A replica, and a head that is one too or each rank's own."""

    def __init__(self, head_too: bool) -> None:
        super().__init__()
        self.body = DistributedDataParallel(nn.Linear(64, 64))
        self.head: nn.Module = nn.Linear(64, 2)
        if head_too:
            self.head = DistributedDataParallel(self.head)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of ``[n, 64]``."""
        loss: Tensor = self.head(self.body(x)).square().sum()
        return loss


def saved(rank: int, world: int, folder: str, head_too: bool, pages: bool) -> dict[str, Any]:
    """Save to one directory, once more with equal heads where that is refused; load, compare."""
    torch.manual_seed(0)
    model = Net(head_too)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block: Any = contextlib.nullcontext()
    if pages:
        config = {"step_aside": False, "page_bytes": 4096, "min_paged_bytes": 1024}
        block = dynoffload.offload(model, optimizer, budget="1MiB", config=config, pilot=None)
    found: dict[str, Any] = {"refused": ""}
    where = Path(folder) / "common"
    with block:
        torch.manual_seed(rank)
        model(torch.randn(2, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            dynoffload.save_checkpoint(model, optimizer, where)
        except CheckpointError as error:
            found["refused"] = str(error)
            for parameter in model.head.parameters():
                dist.broadcast(parameter.data, 0)
            dynoffload.save_checkpoint(model, optimizer, where)
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        dist.barrier()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dynoffload.load_checkpoint(model, optimizer, where)
        pairs = zip(kept, model.parameters(), strict=True)
        found["same"] = all(torch.equal(one, two) for one, two in pairs)
    return found
