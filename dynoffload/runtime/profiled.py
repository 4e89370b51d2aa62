"""What ``offload()`` does under ``dynoffload profile``: it records traces, and pages nothing.

The script that is profiled was written for a session and may ask one for its statistics. What it
gets here has a session's names, and says of each what is true while nothing is offloaded.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.config import Defaults, OffloadConfig
from dynoffload.errors import ProfilingDone
from dynoffload.runtime.checkpoints.loading import load
from dynoffload.runtime.checkpoints.saving import save
from dynoffload.runtime.checkpoints.tensors import Ordinary
from dynoffload.runtime.interrupts import interruptible
from dynoffload.runtime.materialize import Init, give_weights, recipe_of, tensors_on_meta
from dynoffload.runtime.sizing import Sizing
from dynoffload.runtime.telemetry import RunLog, table_of

if TYPE_CHECKING:
    import pandas as pd

    from dynoffload.profiler.trace import Trace
    from dynoffload.reporting import ReportFiles

logger = logging.getLogger(__name__)


class ProfiledSession:
    """Stands in for a `Session` where steps are recorded: the same public names, and no effect.

    Attributes:
        model: the root module.
        optimizer: its optimizer, or None.
        sizing: no budget was divided: all is 0.
        spill_dir: None, as nothing is spilled.
        log: of no step; the traces have them.
        backend: ``"profile"``.
        paging: False.
    """

    paging = False
    spill_dir = None

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, policy: str) -> None:
        self.model, self.optimizer = model, optimizer
        self.sizing = Sizing(**dict.fromkeys(Sizing.__dataclass_fields__, 0))
        self.backend = "profile"
        self._empty = tensors_on_meta(model)
        self.log = RunLog(type(model).__name__, self.backend, policy, budget=0, headroom=0)

    @property
    def stats(self) -> pd.DataFrame:
        """The columns of a session's, and no row."""
        return table_of(self.log.steps)

    def flush(self) -> None:
        """Do nothing: no update is ever put off."""

    def materialize(self, init: Init = None) -> None:
        """Give a model built on the meta device its weights, in memory; see `Session.materialize`.

        Raises:
            ConfigError: a module cannot initialise itself, or the file lacks a tensor.
        """

        def nothing(tensors: Iterable[torch.Tensor]) -> None:
            pass  # all is in memory

        give_weights(self.model, init, self._empty, nothing, everything=not self._empty)

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
        """Do nothing: all tensors are ordinary ones."""


@contextlib.contextmanager
def profiled(
    model: nn.Module, optimizer: Optimizer | None, given: Defaults, config: OffloadConfig
) -> Iterator[ProfiledSession]:
    """Save a trace of each step to ``given.profile_dir``; a block in place of a session's.

    Raises:
        ProfilingDone: ``given.profile_steps`` were saved.
    """
    from dynoffload.profiler import Recorder
    from dynoffload.profiler.profiling import next_number

    assert given.profile_dir is not None
    directory, limit = given.profile_dir, given.profile_steps
    directory.mkdir(parents=True, exist_ok=True)
    first, saved = next_number(directory), 0

    def save(trace: Trace) -> None:
        nonlocal saved
        trace.step = first + saved
        trace.save(directory / f"step-{trace.step:06d}.parquet")
        saved += 1
        if limit is not None and saved >= limit:
            raise ProfilingDone

    session = ProfiledSession(model, optimizer, config.policy)
    recipe = recipe_of(model)
    if recipe is None and tensors_on_meta(model):
        recipe = (None,)
    if recipe is not None:
        interruptible(session.materialize)(recipe[0])
    with Recorder(model, optimizer, features=config.features, on_step=save):
        yield session
