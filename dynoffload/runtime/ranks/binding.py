"""Which memory nodes a rank keeps to while its session lasts: its accelerator's, or its share.

What it is: the choice of a torchrun rank's nodes (NUMA) on a host with several, and threads bound
to their cores. What it is not: a policy of memory. Linux takes a page from the node of the thread
that touches it first, so what a bound process's threads touch (pinned slabs, staging, pools) lies
there; a policy that a launcher has set, such as numactl's, is left as it is.

[Note: what a launcher has set]  Cores are only ever taken away. Without an accelerator a rank takes
its share of the nodes only where it has the cores of the process that started it: else somebody has
divided them already.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynoffload.memory.cores import list_of_cores, node_of, nodes

logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class Binding:
    """Memory nodes, and those of their cores that a process may use."""

    nodes: tuple[int, ...]
    cores: frozenset[int]

    def __str__(self) -> str:
        plural = "s" if len(self.nodes) > 1 else ""
        listed = ", ".join(map(str, self.nodes))
        return f"bound to memory node{plural} {listed} (cores {list_of_cores(self.cores)})"


def binding_for(
    address: str | None,
    *,
    affinity: Collection[int] | None = None,
    launcher: Collection[int] | None = None,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Binding | None:
    """Return what a rank of torchrun is to be bound to; None if there is nothing to bind.

    Args:
        address: of its accelerator on the PCI bus; None without one.
        affinity: cores that the process may use; the system's word by default.
        launcher: those of the process that started it; the system's word by default.
        environment: torchrun's variables, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
        root: of the file system.
    """
    place = _place(environment)
    if place is None or not hasattr(os, "sched_getaffinity"):
        return None
    own = set(os.sched_getaffinity(0) if affinity is None else affinity)
    here = {node: cores & own for node, cores in nodes(root).items() if cores & own}
    if len(here) < 2:
        return None
    if address is not None:
        chosen = [node for node in (node_of(address, root),) if node in here]
    else:
        theirs = _of_launcher(own) if launcher is None else set(launcher)
        rank, ranks = place
        begin = rank * len(here) // ranks
        end = max(begin + 1, (rank + 1) * len(here) // ranks)
        chosen = sorted(here)[begin:end] if theirs == own else []
    cores = frozenset(core for node in chosen for core in here[node])
    return Binding(tuple(chosen), cores) if cores and cores != own else None


@contextlib.contextmanager
def bound(binding: Binding | None) -> Iterator[str]:
    """Bind this process's threads within a block, and yield what was bound, in words.

    Threads that have cores of their own keep them. Afterwards threads that are bound so, those that
    were begun meanwhile included, have the cores back that the process had before.
    """
    if binding is None:
        yield ""
        return
    before = os.sched_getaffinity(0)
    wanted = set(binding.cores)
    there = {thread for thread in _threads() if _cores_of(thread) == wanted}
    if not _bind(before, wanted, there):
        yield ""
        return
    logger.debug("%s", binding)
    try:
        yield str(binding)
    finally:
        _bind(wanted, before, there)


def _bind(having: set[int], cores: set[int], others: Collection[int]) -> bool:
    """Give ``cores`` to the threads that have ``having``, but ``others``; False if that is refused,
    and all is as before."""
    done: list[int] = []
    for thread in _threads():
        if thread in others or _cores_of(thread) != having:
            continue
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:  # it has ended
            continue
        except OSError as error:
            logger.warning(
                "threads cannot be bound to cores %s (%s): memory may lie on a far node; "
                "config={'numa': 'off'} binds nothing",
                list_of_cores(cores),
                error.strerror,
            )
            for one in done:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(one, having)
            return False
        done.append(thread)
    return True


def _threads() -> list[int]:
    return sorted(int(entry.name) for entry in _THREADS.iterdir())


def _cores_of(thread: int) -> set[int] | None:
    try:
        return os.sched_getaffinity(thread)
    except OSError:  # it has ended
        return None


def _of_launcher(own: set[int]) -> set[int]:
    """Return the cores of the process that started this one; ours where nobody says."""
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return own


def _place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank on this host and how many there are; None if torchrun did not start it."""
    try:
        rank, ranks = (int(environment[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError):
        return None
    return (rank, ranks) if 0 <= rank < ranks else None
