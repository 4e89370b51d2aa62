"""Queues of no accelerator: parameters are on the CPU, and whatever is given is done by then.

What it is: `Queues` for `HostOptimizer` where there is no link to cross, so that the same code runs
in plain PyTorch on a CPU. What it is not: a device of a session.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

import torch

from dynoffload.memory.accelerator.queues import Moment
from dynoffload.memory.limits import available_bytes


class Done:
    """A `Moment` and a `Lag` that is over.

    Args:
        times: when it began and ended, of a copy.
    """

    def __init__(self, times: tuple[float, float] | None = None) -> None:
        self._times = times

    def reached(self) -> bool:
        """See `Moment.reached`."""
        return True

    def wait(self) -> None:
        """See `Moment.wait`."""

    def seconds(self) -> float | None:
        """See `Lag.seconds`."""
        return 0.0

    def span(self) -> tuple[float, float] | None:
        """See `Copied.span`."""
        return self._times


class Immediate:
    """`Queues` of the CPU."""

    name = "CPU"
    device = torch.device("cpu")
    pinned = True

    def now(self) -> Done:
        """See `Queues.now`."""
        return Done()

    def after(self, moment: Moment) -> Done:
        """See `Queues.after`."""
        return Done()

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """See `Queues.fill`."""
        storage.resize_(nbytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """See `Queues.empty`."""
        storage.resize_(0)

    def copy_in(
        self,
        target: torch.UntypedStorage | torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Moment],
    ) -> Done:
        """See `Queues.copy_in`."""
        return _copy(_bytes_of(target), source)

    def copy_out(
        self,
        target: torch.Tensor,
        source: torch.UntypedStorage | torch.Tensor,
        after: Sequence[Moment],
    ) -> Done:
        """See `Queues.copy_out`."""
        return _copy(target, _bytes_of(source))

    def host(self, nbytes: int) -> torch.Tensor:
        """See `Queues.host`."""
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(error.strerror) from error
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def release(self, memory: torch.Tensor, *, held: bool) -> None:
        """See `Queues.release`: the mapping ends with the last tensor over it."""

    def peak_bytes(self) -> int:
        """See `Queues.peak_bytes`."""
        return 0

    def given_bytes(self) -> int:
        """See `Queues.given_bytes`."""
        return 0

    def free_bytes(self) -> int:
        """See `Queues.free_bytes`."""
        return available_bytes()

    def trim(self, limit: int) -> None:
        """See `Queues.trim`."""


def _copy(target: torch.Tensor, source: torch.Tensor) -> Done:
    start = time.perf_counter()
    with torch.no_grad():
        target.copy_(source)
    return Done((start, time.perf_counter()))


def _bytes_of(memory: torch.UntypedStorage | torch.Tensor) -> torch.Tensor:
    if isinstance(memory, torch.Tensor):
        return memory
    return torch.empty(0, dtype=torch.uint8).set_(memory)
