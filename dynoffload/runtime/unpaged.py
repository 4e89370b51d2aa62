"""What all sessions share that page nothing themselves: `Unpaged`, with a session's public names.

What it is: saving, loading, statistics and reports over ordinary tensors. What it is
not: a policy; recording traces (``profiled``), recomputation (``recompute``) and paging by the
system (``swapping``) are its heirs, and what stands here is true of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from dynoffload.runtime.checkpoints.loading import load
from dynoffload.runtime.checkpoints.saving import save
from dynoffload.runtime.checkpoints.tensors import Ordinary
from dynoffload.runtime.interrupts import interruptible
from dynoffload.runtime.meta_init import MetaInit
from dynoffload.runtime.sizing import Sizing
from dynoffload.runtime.telemetry import RunLog, table_of

if TYPE_CHECKING:
    import pandas as pd

    from dynoffload.reporting import ReportFiles


class Unpaged:
    """A model with ordinary tensors in an `offload` block.

    Attributes:
        model: the root module.
        optimizer: its optimizer, or None.
        sizing: nothing is divided: all but the budget is 0.
        spill_dir: None, where nothing is spilled.
        spill_bytes: 0.
        log: all that was recorded so far.
        backend: who keeps the budget.
        paging: False, as no tensor is paged by dynoffload.
    """

    paging = False
    spill_dir: Path | None = None
    spill_bytes = 0

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, backend: str, policy: str, budget: int
    ) -> None:
        self.model, self.optimizer, self.backend = model, optimizer, backend
        nothing = dict.fromkeys(Sizing.__dataclass_fields__, 0)
        self.sizing = Sizing(**{**nothing, "budget": budget})
        self._leave_block: Callable[[], None] | None = None  # while it is open
        self.log = RunLog(type(model).__name__, backend, policy, budget=budget, headroom=0)

    def _give_noted_weights(self) -> None:
        """Give a model on the meta device the weights that `materialize` has noted, or its own.

        Raises:
            ConfigError: as `materialize`.
        """
        weights = MetaInit(self.model)
        try:
            interruptible(weights.give)()
        except BaseException:
            weights.undo()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.model).__name__}, policy {self.log.policy}>"

    @property
    def stats(self) -> pd.DataFrame:
        """One row per step so far; columns are the fields of `StepStats`."""
        return table_of(self.log.steps)

    def flush(self) -> None:
        """Do nothing: no update is ever put off."""

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Save the run; see `Session.save`."""
        save(
            self.model,
            self.optimizer,
            directory,
            extra=extra,
            max_shard_size=max_shard_size,
            memory=Ordinary(),
        )

    def load(self, directory: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Load a checkpoint; see `Session.load`."""
        load(
            self.model,
            self.optimizer,
            directory,
            extra=extra,
            memory=Ordinary(),
            prepare=lambda: None,
        )

    def report(self, path: str | Path) -> ReportFiles:
        """Write the HTML page to ``path``, with a Perfetto trace and the run log beside it."""
        from dynoffload.reporting import write_run

        return write_run(self.log, Path(path))

    def close(self) -> None:
        """End the block; see `Session.close`."""
        if self._leave_block is not None:
            self._leave_block()
