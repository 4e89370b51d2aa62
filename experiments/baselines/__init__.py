"""Other systems' ways to train under a budget, to compare with: `baseline`, by name.

``"dtr"`` is dynamic tensor rematerialization, ``"replay"`` the strict order of ZeRO-Infinity's
prefetcher. Paging by the operating system needs no block: plain training runs in a `memory_group`
with a `swap_file` (`dynoffload.experiments.baselines.cgroup`).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

DTR, REPLAY = "dtr", "replay"
BASELINES = (DTR, REPLAY)
"""The names that `baseline` takes."""


def baseline(
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    budget: int,
    spill_dir: str | Path | None = None,
) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which ``model`` is trained by a baseline; it yields what has a ``log``.

    Args:
        name: one of `BASELINES`.
        model: the root; for ``"dtr"`` with its weights.
        optimizer: its optimizer.
        budget: bytes.
        spill_dir: of ``"replay"``.

    Raises:
        BudgetError: as the block is entered, or in a step: the budget is too small.
    """
    if name == DTR:
        from dynoffload.experiments.baselines.dtr import recomputing

        return recomputing(model, optimizer, budget)
    from dynoffload.experiments.baselines.replay import replaying

    return replaying(model, optimizer, budget, spill_dir)
