"""The threads that update parameters on the host: one that leads, and torch's own beside it.

What it is: an executor of one thread, bound to the cores that `dynoffload.memory.cores` names,
whose parallel regions take as many threads as there are. What it is not: who decides what they do.

The number of threads is OpenMP's for the leading thread alone: that of torch for the process, and
of other threads, stays as it is. The others are made by its first parallel region and inherit its
cores. Host memory is taken by the leading thread too, so that its pages lie on that node.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from dynoffload.errors import ConfigError
from dynoffload.memory.cores import Cores

_Result = TypeVar("_Result")


@functools.cache
def _openmp() -> Any:
    """Return what sets OpenMP's number of threads for the thread that asks."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="openmp")


class Crew:
    """Computes on the host, beside the calling thread.

    Args:
        device: whose pinned memory it takes.
        cores: on which; also how many threads, if ``threads`` is None.
        threads: as many, on the same cores.

    Attributes:
        threads: how many there are.
        cores: those given.

    Raises:
        ConfigError: ``threads`` is no number of threads.
    """

    def __init__(self, device: torch.device, cores: Cores, threads: int | None = None) -> None:
        if threads is not None and (isinstance(threads, bool) or threads < 1):
            raise ConfigError(
                f"threads={threads!r} update nothing: pass 1 or more, or None for one for each "
                "core of this process on the accelerator's memory node"
            )
        self.cores, self._device = cores, device
        self.threads = len(cores.numbers) if threads is None else threads
        self._limit: Any = None
        self._executor = ThreadPoolExecutor(1, "dynoffload-update", self._begin)

    def _begin(self) -> None:
        if self._device.index is not None:  # else it would wake the first accelerator
            torch.accelerator.set_device_index(self._device.index)
        with contextlib.suppress(OSError, AttributeError):  # where the system lets nobody choose
            os.sched_setaffinity(0, self.cores.numbers)
        torch.get_num_threads()  # torch gives a new thread the process's number once: before ours
        self._limit = _openmp().limit(limits=self.threads)

    def give(self, work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Have ``work`` done after all that was given before."""
        return self._executor.submit(work, *arguments)

    def do(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Have ``work`` done, and wait for it."""
        return self.give(work, *arguments).result()

    def close(self) -> None:
        """Finish what was given, and end."""
        self._executor.shutdown()
