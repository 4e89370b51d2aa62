"""What ``offload()`` does under ``dynoffload profile``: it records traces, and pages nothing.

The script that is profiled was written for a session and may use one: to save and load, to
ask for statistics. It gets all of these over ordinary tensors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from dynoffload.config import Defaults, OffloadConfig
from dynoffload.errors import ProfilingDone
from dynoffload.runtime.checkpoints.loading import load
from dynoffload.runtime.checkpoints.saving import save
from dynoffload.runtime.checkpoints.tensors import Ordinary
from dynoffload.runtime.interrupts import interruptible
from dynoffload.runtime.meta_init import MetaInit
from dynoffload.runtime.sizing import Sizing
from dynoffload.telemetry import RunLog, table_of

if TYPE_CHECKING:
    import pandas as pd

    from dynoffload.profiler.trace import Trace
    from dynoffload.reporting import ReportFiles

logger = logging.getLogger(__name__)


class ProfiledSession:
    """Stands in for a `Session` where steps are recorded: the same public names, and no effect.

    Attributes:
        model: the root module, with ordinary tensors.
        optimizer: its optimizer, or None.
        backend: ``"profile"``.
        sizing: all 0, the budget too.
        spill_dir: None.
        spill_bytes: 0.
        log: of no step; the traces have them.
        paging: False.
    """

    backend = "profile"
    paging = False
    spill_dir: Path | None = None
    spill_bytes = 0

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, policy: str) -> None:
        self.model, self.optimizer = model, optimizer
        self.sizing = Sizing(**dict.fromkeys(Sizing.__dataclass_fields__, 0))
        self._leave_block: Callable[[], None] | None = None  # while it is open
        self.log = RunLog(type(model).__name__, self.backend, policy, budget=0, headroom=0)

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
        """Write the page of a run without a step, and say why it has none."""
        from dynoffload.reporting import write_run

        logger.warning(
            "%s shows no step: 'dynoffload profile' records traces, and nothing was offloaded; "
            "'dynoffload run --report' makes the page of a run",
            path,
        )
        return write_run(self.log, Path(path))

    def close(self) -> None:
        """End the block; see `Session.close`."""
        if self._leave_block is not None:
            self._leave_block()


@contextlib.contextmanager
def profiled(
    model: nn.Module, optimizer: Optimizer | None, given: Defaults, config: OffloadConfig
) -> Iterator[ProfiledSession]:
    """Save a trace of each step to ``given.profile_dir``; a block in place of a session's.

    Raises:
        ProfilingDone: ``given.profile_steps`` were saved.
    """
    from dynoffload.profiler import Recorder, save_trace
    from dynoffload.profiler.profiling import file_of_step, next_number, of_another

    assert given.profile_dir is not None
    directory, limit = given.profile_dir, given.profile_steps
    directory.mkdir(parents=True, exist_ok=True)
    if beside := of_another(directory, model):
        logger.warning(
            "%s holds traces of another network, such as %s: a pilot learns from those of one, so "
            "keep each in a directory of its own",
            directory,
            beside.name,
        )
    first, saved = next_number(directory), 0

    def save(trace: Trace) -> None:
        nonlocal saved
        trace.step = first + saved
        save_trace(trace, file_of_step(directory, trace.step))
        saved += 1
        if limit is not None and saved >= limit:
            raise ProfilingDone

    session = ProfiledSession(model, optimizer, config.policy)
    session._give_noted_weights()
    with Recorder(model, optimizer, features=config.features, on_step=save):
        yield session
