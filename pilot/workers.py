"""Worker processes for training jobs, through joblib, on this machine or a cluster.

Within ``joblib.parallel_config("dask", client=client)`` tasks run on that Dask cluster; joblib's
other backends work alike. Each task computes with one thread, so that results do not depend on
which worker runs it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from dynoffload.errors import ConfigError

Made = TypeVar("Made")
_LOOK_S = 0.5  # seconds between a worker's checks that its parent is alive


def run_tasks(
    task: Callable[..., Made], given: Iterable[tuple[Any, ...]], jobs: int | None = None
) -> Iterator[tuple[int, Made]]:
    """Yield the number and the result of each task, in order of completion.

    Args:
        task: a module-level function, called with each of ``given``.
        given: the arguments of each task.
        jobs: processes; 1 for this process alone, -1 for one per core, None for the setting of
            `joblib.parallel_config`, by default this process alone.

    Raises:
        ConfigError: if ``jobs`` is no number of processes.
    """
    if jobs is not None and jobs < 1 and jobs != -1:
        raise ConfigError(f"jobs is a number of processes from 1 on, or -1 for all, not {jobs}")
    if jobs == 1:
        for number, arguments in enumerate(given):
            yield number, task(*arguments)
        return
    import joblib
    from joblib.parallel import LokyBackend, get_active_backend

    ours: dict[str, Any] = {}
    if isinstance(get_active_backend()[0], LokyBackend):
        ours = {"initializer": _end_with, "initargs": (os.getpid(),)}
    parallel = joblib.Parallel(
        n_jobs=jobs, return_as="generator_unordered", max_nbytes=None, **ours
    )
    yield from parallel(
        joblib.delayed(_numbered)(task, number, *arguments)
        for number, arguments in enumerate(given)
    )


def _numbered(task: Callable[..., Made], number: int, *arguments: Any) -> tuple[int, Made]:
    with one_thread():
        return number, task(*arguments)


def _end_with(parent: int) -> None:
    """Make this worker exit when its parent does, even if the parent is killed or already gone.
    The kernel's parent-death signal is unsuitable: it is sent when the parent *thread* that
    started the worker ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="dynoffload-parent", daemon=True).start()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit numeric libraries to one thread: results depend on the thread count."""
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    with threadpool_limits(1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
