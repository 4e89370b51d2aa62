"""Baselines: other systems' methods of training under a budget; `baseline` returns one by name.

``"dtr"`` is dynamic tensor rematerialization; ``"replay"`` is ZeRO-Infinity's prefetcher, which
replays a recorded order strictly. Paging by the operating system needs no block: plain training
runs in a `memory_group` with a `swap_file` (`dynoffload.experiments.baselines.cgroup`).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

DTR, REPLAY = "dtr", "replay"
BASELINES = (DTR, REPLAY)
"""Names that `baseline` accepts."""


def baseline(
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    budget: int,
    spill_dir: str | Path | None = None,
) -> contextlib.AbstractContextManager[Any]:
    """Return a block that trains ``model`` with a baseline; it yields an object with a ``log``.

    Args:
        name: one of `BASELINES`.
        model: the root module; for ``"dtr"`` its weights must exist.
        optimizer: its optimizer.
        budget: bytes.
        spill_dir: used by ``"replay"``.

    Raises:
        BudgetError: at entry or in a step, if the budget is too small.
    """
    if name == DTR:
        from dynoffload.experiments.baselines.dtr import recomputing

        return recomputing(model, optimizer, budget)
    from dynoffload.experiments.baselines.replay import replaying

    return replaying(model, optimizer, budget, spill_dir)
