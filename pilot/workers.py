"""Workers: the processes, here or on a cluster, that a training job runs in.

What it is: `Workers`, by which joblib runs a job's tasks: in processes on this machine, on a Dask
cluster, or on a Ray cluster, and `check_cluster`, which refuses an address that cannot be served.
What it is not: a scheduler of its own. Libraries of clusters are imported only when they are asked
for; workers compute with one thread each, so that results do not depend on how many there are.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from dynoffload.errors import ClientError, ConfigError, PilotError

CONNECT_SECONDS = 10.0
"""How long a scheduler may take to answer."""

Made = TypeVar("Made")
_LOOK_S = 0.5  # how often a worker looks whether its parent lives


@dataclass(frozen=True)
class Workers:
    """Who runs the tasks of a job.

    Attributes:
        jobs: processes on this machine; None for one per core that this process may use.
        cluster: a scheduler's address, such as ``tcp://host:8786`` (Dask) or ``ray://host:10001``;
            None for this machine.
    """

    jobs: int | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        """Refuse a number of processes that is none."""
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs is a number of processes from 1 on, not {self.jobs}")

    @property
    def count(self) -> int:
        """Processes on this machine."""
        if self.jobs is not None:
            return self.jobs
        from joblib import cpu_count

        return int(cpu_count())

    def here(self) -> Workers:
        """Return the same without the cluster."""
        return Workers(self.jobs)

    def run(
        self, task: Callable[..., Made], given: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Made]]:
        """Yield the number of each task and what it returned, as they end.

        Args:
            task: a function of a module, called with each of ``given``.
            given: the arguments of each task.

        Raises:
            ClientError: if the library of the cluster is not installed.
            PilotError: if the cluster does not answer, has no workers, or fails.
        """
        if self.cluster is None and self.count == 1:
            for number, arguments in enumerate(given):
                yield number, task(*arguments)
            return
        import joblib

        parent = os.getpid() if self.cluster is None else None
        numbered = (
            joblib.delayed(_numbered)(parent, task, number, *arguments)
            for number, arguments in enumerate(given)
        )
        with _backend(self) as jobs:
            parallel = joblib.Parallel(
                n_jobs=jobs, return_as="generator_unordered", max_nbytes=None
            )
            if self.cluster is None:
                yield from parallel(numbered)
                return
            try:
                yield from parallel(numbered)
            except Exception as error:
                raise PilotError(
                    f"the cluster at {self.cluster} failed ({type(error).__name__}: "
                    f"{str(error)[:300]}): see that dynoffload is installed on all its workers and "
                    "that they are alive; what was done is kept, so the same command goes on"
                ) from error


SERIAL = Workers(1)
"""This process alone."""


def _numbered(
    parent: int | None, task: Callable[..., Made], number: int, *arguments: Any
) -> tuple[int, Made]:
    """Carry a task out; a worker of this machine ends when ``parent`` does."""
    if parent is not None:
        _end_with(parent)
    return number, task(*arguments)


@cache
def _end_with(parent: int) -> None:
    """Let this process end with its parent, unless it is that one: who is killed tells its workers
    nothing, and they would wait for it. The kernel's own signal for it would not do: it comes when
    the parent's *thread* ends that asked for the work."""
    if os.getpid() == parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="dynoffload-parent", daemon=True).start()


@contextmanager
def _backend(workers: Workers) -> Iterator[int]:
    """Make joblib use these workers; yield the number of processes that it shall use."""
    import joblib

    if workers.cluster is None:
        with joblib.parallel_config("loky", inner_max_num_threads=1):
            yield workers.count
        return
    if workers.cluster.startswith("ray://"):
        with _ray(workers.cluster):
            yield -1
        return
    with _dask(workers.cluster) as client, joblib.parallel_config("dask", client=client):
        yield -1


@contextmanager
def _dask(address: str) -> Iterator[Any]:
    try:
        from distributed import Client
    except ImportError as error:
        raise ClientError(
            f"labelling on the Dask cluster at {address} needs Dask, which is not installed: "
            "pip install 'dynoffload[cluster]'"
        ) from error
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError, TypeError) as error:
        raise PilotError(
            f"no Dask scheduler answers at {address} ({type(error).__name__}: {str(error)[:200]}): "
            "start one with 'dask scheduler', and give its address as tcp://HOST:8786"
        ) from error
    with client:
        if not client.ncores():
            raise PilotError(
                f"the Dask scheduler at {address} has no workers: start some with "
                f"'dask worker {address}'"
            )
        yield client


@contextmanager
def _ray(address: str) -> Iterator[None]:
    import joblib

    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
        from ray.util.joblib import (  # type: ignore[import-not-found, unused-ignore]
            register_ray,
        )
    except ImportError as error:
        raise ClientError(
            f"labelling on the Ray cluster at {address} needs Ray, which is not installed: "
            "pip install 'ray[client]'"
        ) from error
    try:
        ray.init(address)
    except Exception as error:  # ray has errors of its own
        raise PilotError(
            f"no Ray cluster answers at {address} ({type(error).__name__}: {str(error)[:200]}): "
            "start one with 'ray start --head', and give its address as ray://HOST:10001"
        ) from error
    try:
        register_ray()
        with joblib.parallel_config("ray"):
            yield
    finally:
        ray.shutdown()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let libraries of numbers use one thread, as in workers: results depend on how many."""
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    with threadpool_limits(1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
