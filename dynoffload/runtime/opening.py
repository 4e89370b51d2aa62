"""What a block was asked for, and the device it pages with: an accelerator, the pager, or the
mapped file."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynoffload.config import OffloadConfig
from dynoffload.errors import BackendError, BudgetError
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.device import Device
from dynoffload.memory.limits import available_bytes
from dynoffload.memory.mapped import MappedFile
from dynoffload.memory.pager import Pager, probe
from dynoffload.runtime.host import Possible
from dynoffload.runtime.migration.forecast import Predictor
from dynoffload.runtime.sizing import Sizing
from dynoffload.runtime.target import Target
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)

IO_THREADS = 4
"""Threads that read and write the spill file."""


@dataclass(frozen=True)
class Setup:
    """What a block was asked for.

    Attributes:
        model: the root.
        optimizer: its optimizer, or None.
        sizing: how the budget is divided.
        config: options.
        spill_dir: where the spill file is stored.
        target: where operators run.
        pilot: a predictor, ``"auto"`` or None.
        spill_reason: why the spill directory is not the system's usual one, or "".
        replicas: the wrappers of the model.
        possible: the memory that the process can have.
        sourced: parameters that are read from files of others, and take no room in the spill file.
    """

    model: nn.Module
    optimizer: Optimizer | None
    sizing: Sizing
    config: OffloadConfig
    spill_dir: Path
    target: Target
    pilot: Predictor | str | None
    spill_reason: str
    replicas: tuple[DistributedDataParallel, ...]
    possible: Possible
    sourced: frozenset[nn.Parameter]


def open_device(setup: Setup) -> Device:
    """Return the device that ``setup`` asks for, or the best one that works here.

    Raises:
        BackendError: the pager was asked for by name but does not work.
        BudgetError: the host has no room for what is not on the accelerator.
        SpillError: the spill directory cannot be used.
    """
    sizing, config, target = setup.sizing, setup.config, setup.target
    if target.queues is None:
        reason = probe() if config.backend != "mapped" else "the mapped file was asked for"
        if reason and config.backend == "pager":
            raise BackendError(f"{reason}; use backend='mapped' or 'auto'")
        if reason and config.backend == "auto":
            logger.info("using the mapped-file backend: %s", reason)
        return (MappedFile if reason else Pager)(
            sizing.pool_bytes,
            sizing.page_bytes,
            setup.spill_dir,
            need=sizing.spill_bytes,
            debug=config.debug,
        )
    if config.debug:
        logger.warning("debug compares nothing on an accelerator: what moves is not checksummed")
    host = sizing.spill_bytes if target.host_budget is None else target.host_budget
    have = available_bytes()
    if host > have:
        asked = "takes" if target.host_budget is None else "was asked for and is"
        raise BudgetError(
            f"what is not on the accelerator {asked} {format_bytes(host)} of host memory, and "
            f"there are {format_bytes(have)}: pass host_budget= what can be spared, and the rest "
            "goes to a file"
        )
    return Accelerator(
        target.queues,
        sizing.pool_bytes,
        setup.spill_dir,
        page_bytes=sizing.page_bytes,
        budget=sizing.budget,
        least=sizing.least_bytes,
        need=sizing.spill_bytes,
        host_budget=target.host_budget,
        threads=IO_THREADS,
    )
