"""``offload()`` under ``dynoffload profile``: it records traces and pages nothing.

The script may still save, load and read statistics: its session's mode is a plain `Mode`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from dynoffload.config import Defaults, OffloadConfig
from dynoffload.errors import ProfilingDone
from dynoffload.managed import managers
from dynoffload.runtime.interrupts import interruptible
from dynoffload.runtime.meta_init import MetaInit
from dynoffload.runtime.session import Session

if TYPE_CHECKING:
    from dynoffload.profiler.trace import Trace

logger = logging.getLogger(__name__)


def _give_weights(model: nn.Module) -> None:
    """Give a model on the meta device the weights that `materialize` noted, or its default ones."""
    weights = MetaInit(model)
    try:
        interruptible(weights.give)()
    except BaseException:
        weights.undo()
        raise


@contextlib.contextmanager
def profiled(
    model: nn.Module, optimizer: Optimizer | None, given: Defaults, config: OffloadConfig
) -> Iterator[Session]:
    """Save a trace of each step to ``given.profile_dir``; replaces a session's block.

    Raises:
        ProfilingDone: ``given.profile_steps`` were saved.
    """
    from dynoffload.profiler import Recorder, save_trace
    from dynoffload.profiler.profiling import file_of_step, next_number, of_another

    assert given.profile_dir is not None
    directory, limit = given.profile_dir, given.profile_steps
    directory.mkdir(parents=True, exist_ok=True)
    if foreign := of_another(directory, model):
        logger.warning(
            "%s holds traces of another network, such as %s: a pilot learns from those of one, so "
            "keep each in a directory of its own",
            directory,
            foreign.name,
        )
    first, saved = next_number(directory), 0

    def save(trace: Trace) -> None:
        nonlocal saved
        trace.step = first + saved
        save_trace(trace, file_of_step(directory, trace.step))
        saved += 1
        if limit is not None and saved >= limit:
            raise ProfilingDone

    session = Session.plain(model, optimizer, backend="profile")
    session.log.policy = config.policy
    _give_weights(model)
    features, probes = config.features, config.routing_probes
    with Recorder(model, optimizer, features=features, routing_probes=probes, on_step=save):
        managers[id(model)] = session
        try:
            yield session
        finally:
            managers.pop(id(model), None)
