"""The threads that update parameters: one that leads, and those of its parallel regions.

OpenMP's number of threads is set for the leading thread alone; torch's for the process, and that
of other threads, stays as it is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from dynoffload.errors import ConfigError
from dynoffload.launch import local_ranks

_Result = TypeVar("_Result")


class WorkerPool:
    """Runs work in order, beside the calling thread.

    Args:
        device: of the parameters.
        threads: how many; None: one for each core that the process may use, divided among the
            processes that the launcher has started here.

    Attributes:
        threads: how many there are.

    Raises:
        ConfigError: ``threads`` is no number of threads.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        if threads is not None and (isinstance(threads, bool) or threads < 1):
            raise ConfigError(
                f"threads={threads!r} cannot update parameters: pass 1 or more, or None for one "
                "for each core that this process may use"
            )
        self._device = device
        cores = len(os.sched_getaffinity(0))
        self.threads = max(1, cores // local_ranks()) if threads is None else threads
        self._limit: Any = None
        self._executor = ThreadPoolExecutor(1, "dynoffload-update", self._begin)

    def _begin(self) -> None:
        if self._device.index is not None:  # else it would initialise the first accelerator
            torch.accelerator.set_device_index(self._device.index)
        torch.get_num_threads()  # sets a new thread's number to the process's: before the limit
        self._limit = _openmp().limit(limits=self.threads)

    def submit(self, work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Run ``work`` after all that was submitted before."""
        return self._executor.submit(work, *arguments)

    def close(self) -> None:
        """Finish what was submitted, and end."""
        self._executor.shutdown()


@functools.cache
def _openmp() -> Any:
    """Return what sets OpenMP's number of threads for the calling thread."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="openmp")
