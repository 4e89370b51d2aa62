"""`policy="os-paging"`: plain PyTorch, paged by the operating system under a memory cgroup.

What it is: the twin of unified virtual memory on a CPU, as a measured side to compare with. What it
is not: managed by dynoffload in any way; the kernel decides by page and by use what is where.

[Note: what the budget means]  The process joins a group whose hard limit is the budget. A group is
charged with the pages that are first touched in it, so the model's tensors get new pages as the
block begins (`dynoffload.memory.recharge`), and what the process had besides (the interpreter,
libraries, the user's data) stays outside. Inside is all that is new in the block: activations,
gradients, operators' temporaries, freed heap, and the page cache of files that are read. So the
budget is a little stricter here than for the other policies, which leave temporaries and heap to
the headroom: for the same memory, raise it by what they report as that. At the end the process goes
back to its group, and the model's tensors with it.

[Note: swap]  What does not fit goes to the system's swap: to what is free of it, if that is twice
the bytes of a step without activations, else to a file that is made for the block in the spill
directory. The system may use that for other processes, too. If it is full, the kernel ends the
process, as it may under a small budget whenever swap is too slow. A swap file that is left then is
switched off and removed by the next block that makes one there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dynoffload.config import OffloadConfig
from dynoffload.errors import BudgetError, ConfigError
from dynoffload.memory.cgroup import LimitError, MemoryGroup, memory_group, swap_file, version
from dynoffload.memory.cgroup import why_unavailable as why_no_group
from dynoffload.memory.limits import cgroup_directories
from dynoffload.memory.recharge import recharge
from dynoffload.runtime.counting import parts_of, tensors_of, whole_bytes
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.telemetry import StepStats
from dynoffload.runtime.unpaged import Unpaged
from dynoffload.units import MiB, format_bytes

logger = logging.getLogger(__name__)

LEAST_BUDGET = 96 * MiB
"""The kernel ends a process of whose group nothing can be reclaimed, as all of it is on its way to
swap: seen under 76 MiB on Linux 6.18 (a network of 192 MiB, version 1), and not under 92."""


class SwappingSession(Unpaged):
    """A model whose memory the operating system pages."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        budget: int,
        config: OffloadConfig,
        spill_dir: Path,
        group: MemoryGroup,
    ) -> None:
        super().__init__(model, optimizer, "swap", config.policy, budget)
        self.spill_dir = spill_dir
        self._group = group
        self._began, self._before = time.perf_counter(), _swapped()

    @uninterrupted
    def _charge(self) -> None:
        """Have the model's tensors charged to the group in which the process is."""
        storages: dict[int, int] = {}
        for whole in tensors_of(self.model, self.optimizer):
            for tensor in parts_of(whole):
                if tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        done, left = recharge(storages.items())
        logger.debug("%s charged anew, %s not", format_bytes(done), format_bytes(left))
        if left:
            logger.warning(
                "%s of the model's tensors are shared, locked or mapped from a file, and stay "
                "outside of the group: the budget does not hold for them; clone them first",
                format_bytes(left),
            )

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Be in the group, and take the numbers of each step."""
        try:
            with self._group.joined(), contextlib.ExitStack() as stack:
                self._give_noted_weights()
                self._charge()
                self._group.take_peak()
                if self.optimizer is not None:
                    handle = self.optimizer.register_step_post_hook(self._end_step)
                    stack.callback(handle.remove)
                self._began, self._before = time.perf_counter(), _swapped()
                yield
        finally:
            self._charge()  # to the group from which it came

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        now, swapped, before = time.perf_counter(), _swapped(), self._before
        self.log.steps.append(
            StepStats(
                step=len(self.log.steps),
                seconds=now - self._began,
                stalls=swapped[2] - before[2],
                stall_s=0.0,
                bytes_in=swapped[0] - before[0],
                bytes_out=swapped[1] - before[1],
                prefetched_bytes=0,
                used_bytes=0,
                wasted_bytes=0,
                accuracy=math.nan,
                peak_fast_bytes=self._group.take_peak(),
            )
        )
        self._began, self._before = now, swapped


@contextlib.contextmanager
def swapping(
    model: nn.Module,
    optimizer: Optimizer | None,
    budget: int,
    config: OffloadConfig,
    spill_dir: Path,
) -> Iterator[SwappingSession]:
    """Train ``model`` as it is in a memory cgroup of ``budget``; a block in place of a session's.

    Raises:
        LimitError: no group can be made or joined here, or there is no swap; says what lacks.
        BudgetError: the budget is too small for a process to run in at all.
        ConfigError: an option asks for what this policy lacks.
    """
    if config.rollback:
        raise ConfigError(
            "policy='os-paging' runs plain PyTorch, which undoes no step: leave rollback out, or "
            "use policy='pilot'"
        )
    if budget < LEAST_BUDGET:
        raise BudgetError(
            f"policy='os-paging' needs a budget of at least {format_bytes(LEAST_BUDGET)}, as the "
            "kernel ends a process rather than to wait until pages are in swap, and this is "
            f"{format_bytes(budget)}: raise it, or use policy='pilot'"
        )
    if reason := why_unavailable():
        raise LimitError(reason)
    need = 2 * whole_bytes(model, optimizer)
    with contextlib.ExitStack() as stack:
        if _free_swap() < need:
            try:
                stack.enter_context(swap_file(spill_dir, need))
            except LimitError as error:
                raise LimitError(
                    f"policy='os-paging' needs {format_bytes(need)} of swap, of which "
                    f"{format_bytes(_free_swap())} are free, and none can be added: {error}; add "
                    "swap to the system, or pass spill_dir= on a disk (ext4 or xfs) that can hold "
                    "a swap file"
                ) from error
        inside = cgroup_directories()[0][0] if version() == 1 else None
        group = stack.enter_context(memory_group(budget, swap=True, inside=inside))
        logger.info(
            "%s: %s of parameters, gradients%s and buffers under %s, paged by the system in %s, "
            "policy os-paging",
            type(model).__name__,
            format_bytes(need // 2),
            "" if optimizer is None else ", optimizer state",
            format_bytes(budget),
            group.path,
        )
        session = SwappingSession(model, optimizer, budget, config, spill_dir, group)
        with session._at_work():
            yield session


def why_unavailable() -> str:
    """Return why the system cannot page here for `policy="os-paging"`, with the remedy; "" if it
    can."""
    reason = why_no_group()
    if not reason and not cgroup_directories():
        reason = "this process's own memory cgroup is not to be seen from here"
    if not reason:
        return ""
    return (
        f"policy='os-paging' cannot make a memory cgroup for this process: {reason}; run as root "
        "on a system that lets it write there (in a container: --privileged, with "
        "/sys/fs/cgroup mounted for writing), or use another policy"
    )


def _free_swap() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("SwapFree:"):
            return int(line.split()[1]) * 1024
    return 0


def _swapped() -> tuple[int, int, int]:
    """Return the bytes that the system has read from swap and written to it, for all processes, and
    how often this process has waited for a page."""
    counts = {"pswpin": 0, "pswpout": 0}
    for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
        name, value = line.split()
        if name in counts:
            counts[name] = int(value)
    page = os.sysconf("SC_PAGE_SIZE")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return counts["pswpin"] * page, counts["pswpout"] * page, faults
