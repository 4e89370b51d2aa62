"""The session: the user's handle on a model that trains under a budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from dynoffload.checkpoint.loading import load
from dynoffload.checkpoint.peers import peers_of
from dynoffload.checkpoint.saving import save
from dynoffload.runtime.modes import Mode
from dynoffload.runtime.paging import Paging
from dynoffload.runtime.sizing import Sizing
from dynoffload.runtime.updates.failure import Aftermath
from dynoffload.telemetry import RunLog, table_of
from dynoffload.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

    from dynoffload.reporting import ReportFiles

logger = logging.getLogger(__name__)


class Session:
    """A model and its optimizer in a block of `dynoffload.offload`, which creates it.

    Attributes:
        model: the root module.
        optimizer: its optimizer, or None.
        sizing: how the budget is divided; all 0 under ``dynoffload profile``.
        spill_dir: where the spill file is stored, or None.
        log: everything recorded so far.
    """

    _mode = Mode()

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sizing: Sizing,
        spill_dir: Path | None,
        log: RunLog,
        replicas: Sequence[nn.Module] = (),
    ) -> None:
        self.model, self.optimizer, self.sizing = model, optimizer, sizing
        self.spill_dir, self.log, self._replicas = spill_dir, log, replicas
        self._leave_block: Callable[[], None] | None = None  # while it is open

    @classmethod
    def plain(
        cls,
        model: nn.Module,
        optimizer: Optimizer | None,
        replicas: Sequence[nn.Module] = (),
        backend: str = "",
    ) -> Session:
        """Return a passthrough session, which leaves the model alone."""
        log = RunLog(type(model).__name__, backend, "", budget=0, headroom=0)
        sizing = Sizing(*[0] * 13)
        return cls(model, optimizer, sizing, None, log, replicas)

    def __repr__(self) -> str:
        return (
            f"<Session of {type(self.model).__name__} under {format_bytes(self.sizing.budget)} on "
            f"the {self.backend}, {'paging' if self.paging else 'not paging'}>"
        )

    @property
    def _paging(self) -> Paging | None:
        return self._mode if isinstance(self._mode, Paging) else None

    @property
    def backend(self) -> str:
        """The device's name: ``"pager"`` or ``"mapped"``, or ``"profile"``."""
        return self.log.backend

    @property
    def paging(self) -> bool:
        """Whether the model is paged now; False while everything fits."""
        return self._mode.paging

    @property
    def spill_bytes(self) -> int:
        """Bytes that the spill file takes now; 0 while everything fits."""
        return self._mode.spill_bytes

    @property
    def stats(self) -> pd.DataFrame:
        """One row per step so far; columns are the fields of `StepStats`."""
        return table_of(self.log.steps)

    def flush(self) -> None:
        """Apply all deferred optimizer updates."""
        self._mode.flush()

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Save the run to ``directory``, which is replaced at once; see `save_checkpoint`.

        Deferred updates are applied first. Tensors are read in place, piece by piece, so the
        memory taken is the budget and some megabytes. Call it between steps: gradients are not
        saved, and existing ones stay as they are.

            with dynoffload.offload(model, optimizer, budget="8GiB") as session:
                if Path("run/last").exists():
                    session.load("run/last", extra={"scheduler": scheduler})
                for batch in loader:
                    ...  # forward, backward, step, zero_grad
                session.save("run/last", extra={"scheduler": scheduler})

        Raises:
            CheckpointError: a value cannot be saved, the disk is full or read-only, or the
                directory is something else. Training can go on.
            StepLostError: a step was lost, and nothing was loaded since.
        """
        self._save(self.optimizer, directory, extra, max_shard_size)

    def load(self, directory: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Load a checkpoint, saved under any budget or none; see `load_checkpoint`.

        It drops gradients and deferred updates, and recovers from a lost step.

        Raises:
            CheckpointError: there is none, or it is damaged, foreign, of a newer version, or of
                another model; names what differs, and has changed nothing.
        """
        self._load(self.optimizer, directory, extra)

    def _save(
        self,
        optimizer: Optimizer | None,
        directory: str | os.PathLike[str],
        extra: Mapping[str, Any] | None,
        max_shard_size: int | str,
    ) -> None:
        def settle() -> None:
            self._mode.settle()
            Aftermath.check(self.model, optimizer)

        peers = peers_of(self.model, self._replicas)
        peers.share(settle)
        save(
            self.model,
            optimizer,
            directory,
            extra=extra,
            max_shard_size=max_shard_size,
            memory=self._mode.memory,
            peers=peers,
        )

    def _load(
        self,
        optimizer: Optimizer | None,
        directory: str | os.PathLike[str],
        extra: Mapping[str, Any] | None,
    ) -> None:
        with self._mode.loading(optimizer=optimizer is not None) as begin:
            load(
                self.model,
                optimizer,
                directory,
                extra=extra,
                memory=self._mode.memory,
                prepare=begin,
                peers=peers_of(self.model, self._replicas),
            )
        Aftermath.make_up(self.model, optimizer)

    def report(self, path: str | Path) -> ReportFiles:
        """Write the HTML page to ``path``, and a Perfetto trace and the run log next to it.

        Returns:
            The paths of the three files.
        """
        from dynoffload.reporting import write_run

        if self.backend == "profile":
            logger.warning(
                "%s shows no step: 'dynoffload profile' records traces, and nothing was offloaded; "
                "'dynoffload run --report' makes the page of a run",
                path,
            )
        return write_run(self.log, Path(path))

    def close(self) -> None:
        """End the block, as leaving its ``with`` does; if it has ended, do nothing.

        All tensors are ordinary again, and memory and disk space are freed.
        """
        if self._leave_block is not None:
            self._leave_block()
