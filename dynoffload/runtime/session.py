"""The session: what the user holds while a model trains under a budget."""

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
    """A model and its optimizer in an `dynoffload.offload` block, which makes it.

    Attributes:
        model: the root module.
        optimizer: its optimizer, or None.
        sizing: how the budget is divided; all 0 under ``dynoffload profile``.
        spill_dir: where the spill file lies, or None.
        log: all that was recorded so far.
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
        """Return a session of a model that it leaves alone."""
        log = RunLog(type(model).__name__, backend, "", budget=0, headroom=0)
        sizing = Sizing(**dict.fromkeys(Sizing.__dataclass_fields__, 0))
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
        """Make every optimizer update that was put off."""
        self._mode.flush()

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Save the run to ``directory``, which is replaced at once; see `save_checkpoint`.

        Updates that were put off are made first. Tensors are written piece by piece, from where
        they are, so no more memory is taken than the budget and some megabytes. Call it between
        steps: gradients are not saved, and those that there are stay as they are.

            with dynoffload.offload(model, optimizer, budget="8GiB") as session:
                if Path("run/last").exists():
                    session.load("run/last", extra={"scheduler": scheduler})
                for batch in loader:
                    ...  # forward, backward, step, zero_grad
                session.save("run/last", extra={"scheduler": scheduler})

        Raises:
            CheckpointError: a value cannot be kept, the disk is full or read-only, or the directory
                is something else. Training can go on.
            StepLostError: a step was lost, and nothing was loaded since.
        """
        self._save(self.optimizer, directory, extra, max_shard_size)

    def load(self, directory: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Load a checkpoint, saved under whatever budget or none; see `load_checkpoint`.

        Gradients, updates that were put off and a lost step are gone afterwards.

        Raises:
            CheckpointError: there is none, it is damaged, foreign or of a newer version, or it is
                not of this model; names what differs, and has touched nothing.
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
        """Write the HTML page to ``path``, with a Perfetto trace and the run log beside it.

        Returns:
            The paths of the three.
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
        """End the block, as leaving its ``with`` does; where it has ended, do nothing.

        All tensors are ordinary again, and memory and disk are given back.
        """
        if self._leave_block is not None:
            self._leave_block()
