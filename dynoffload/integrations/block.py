"""An offload() block entered and left by a trainer's events instead of by ``with``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.config import OffloadConfig, defaults, no_budget
from dynoffload.runtime.offload import offload
from dynoffload.units import format_bytes

if TYPE_CHECKING:
    from dynoffload.runtime.block import OffloadBlock
    from dynoffload.runtime.migration.forecast import Predictor
    from dynoffload.runtime.session import Session


logger = logging.getLogger(__name__)


class EventBlock:
    """Enters blocks one after the other, each with the same arguments.

    If logging is not configured, it prints a line when a block begins and one when it ends.

    Args:
        budget, pilot, spill_dir, host_budget, config: as `dynoffload.offload` takes them.

    Attributes:
        session: of the open block, else of the last one; None before the first.
    """

    call = "offload(..., budget='8GiB')"
    """Example call shown in errors about a missing budget."""

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        pilot: Predictor | str | Path | None = "auto",
        spill_dir: str | Path | None = None,
        host_budget: int | str | None = None,
        config: OffloadConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self._given: dict[str, Any] = {
            "budget": budget,
            "pilot": pilot,
            "spill_dir": spill_dir,
            "host_budget": host_budget,
            "config": OffloadConfig.of(config),
        }
        self._open: OffloadBlock | None = None
        self.session: Session | None = None

    @property
    def is_open(self) -> bool:
        """Whether a block is open."""
        return self._open is not None

    def enter(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device | None = None
    ) -> None:
        """Enter a block; one that is still open is left first.

        Args:
            model: the root.
            optimizer: its optimizer.
            device: to which the trainer moves its samples; None: the model's device.

        Raises:
            ConfigError: no budget is given; or as `dynoffload.offload` raises.
        """
        self.leave()
        given = defaults()
        if self._given["budget"] is None and given.budget is None and given.profile_dir is None:
            raise no_budget(self.call)
        block = offload(model, optimizer, device=device, **self._given)
        self.session = block.__enter__()
        self._open = block
        if self.session.sizing.budget and not _logs():  # 0: this block records traces
            _say(_begin_line(self.session))

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the block, if one is open, because of ``error`` or at the end of training."""
        block, self._open = self._open, None
        if block is not None:
            block.__exit__(None if error is None else type(error), error, None)
            self._report_end()

    def _report_end(self) -> None:
        from dynoffload.reporting.summary import in_a_line

        if self.session is None or defaults().on_end is not None:
            return  # the command line reports it
        line = in_a_line(self.session.log)
        if _logs():
            logger.info("%s", line)
        else:
            _say(line)


def _begin_line(session: Session) -> str:
    """Return the line that describes a block at its beginning."""
    states = "gradients" if session.optimizer is None else "gradients and optimizer state"
    return (
        f"{type(session.model).__name__} is trained under {format_bytes(session.sizing.budget)} by "
        f"policy {session.log.policy}: parameters, {states} take "
        f"{format_bytes(session.sizing.states_bytes)}"
    )


def _logs() -> bool:
    """Return whether logging is configured for this package."""
    ours = logging.getLogger("dynoffload")
    return bool(ours.handlers or ours.level or logging.getLogger().handlers)


def _say(line: str) -> None:
    """Print a line to stderr, above a progress bar if there is one."""
    bars = sys.modules.get("tqdm")
    if bars is None:
        sys.stderr.write(f"dynoffload: {line}\n")
    else:
        bars.tqdm.write(f"dynoffload: {line}", file=sys.stderr)
