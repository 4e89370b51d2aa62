"""What ``offload()`` does under ``dynoffload profile``: it records traces, and pages nothing.

The script that is profiled was written for a session and may ask one for its statistics. What it
gets here has a session's names, and says of each what is true while nothing is offloaded.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from dynoffload.config import Defaults, OffloadConfig
from dynoffload.errors import ProfilingDone
from dynoffload.runtime.unpaged import Unpaged

if TYPE_CHECKING:
    from dynoffload.profiler.trace import Trace
    from dynoffload.reporting import ReportFiles

logger = logging.getLogger(__name__)


class ProfiledSession(Unpaged):
    """Stands in for a `Session` where steps are recorded: the same public names, and no effect.

    Its budget is 0, and its log of no step; the traces have them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, policy: str) -> None:
        super().__init__(model, optimizer, "profile", policy, budget=0)

    def report(self, path: str | Path) -> ReportFiles:
        """Write the page of a run without a step, and say why it has none."""
        logger.warning(
            "%s shows no step: 'dynoffload profile' records traces, and nothing was offloaded; "
            "'dynoffload run --report' makes the page of a run",
            path,
        )
        return super().report(path)


@contextlib.contextmanager
def profiled(
    model: nn.Module, optimizer: Optimizer | None, given: Defaults, config: OffloadConfig
) -> Iterator[ProfiledSession]:
    """Save a trace of each step to ``given.profile_dir``; a block in place of a session's.

    Raises:
        ProfilingDone: ``given.profile_steps`` were saved.
    """
    from dynoffload.profiler import Recorder
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
        trace.save(file_of_step(directory, trace.step))
        saved += 1
        if limit is not None and saved >= limit:
            raise ProfilingDone

    session = ProfiledSession(model, optimizer, config.policy)
    session._give_noted_weights()
    with Recorder(model, optimizer, features=config.features, on_step=save):
        yield session
