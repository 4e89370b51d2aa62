"""Status of each rank, shared as one report per rank in the process group's store.

Store operations do not wait for other ranks, so a lost rank cannot make this code hang.

[Note: processes]  A rank on the same machine (and process namespace) is known to be gone as soon as
its process ends. For ranks elsewhere, the only sign is that their report stops changing.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

logger = logging.getLogger(__name__)

_STORE_TIMEOUT = datetime.timedelta(seconds=5)  # timeout of store operations
_MAX_REASON = 200  # characters of a reason
_TORCH = os.path.dirname(torch.__file__) + os.sep
_COLLECTIVES = _TORCH + "distributed" + os.sep
_BACKWARD = _TORCH + "autograd" + os.sep
_REPLICAS = os.path.join(_TORCH + "nn", "parallel", "distributed.py")
_WRAPPERS = ("wrapper", "_time_logger", "wait")  # frames less informative than their caller


@dataclass(frozen=True)
class RankStatus:
    """Progress of one rank.

    Attributes:
        step: number of completed optimizer steps.
        phase: ``"forward"`` or ``"backward"``; "" before the first.
        site: path of the last visited module; "" where none is watched.
        gradient: name of the parameter whose gradient was computed last; "" before the first.
        progress: counter that grows with every event; unchanged means that the rank is stalled.
    """

    step: int = 0
    phase: str = ""
    site: str = ""
    gradient: str = ""
    progress: int = 0

    def describe(self) -> str:
        """Return the status in words, such as ``"step 12, backward, at layers.3"``."""
        parts = [f"step {self.step}"]
        if self.phase:
            parts.append(self.phase)
        if self.phase == "backward" and self.gradient:
            parts.append(f"with the gradient of {self.gradient!r} made last")
        elif self.site:
            parts.append(f"at {self.site!r}")
        return ", ".join(parts)


def awaited(trace: TracebackType | FrameType | None) -> str:
    """Return what a stack waits for from other ranks, as its innermost frame that tells; else "".

    Args:
        trace: an error's traceback, or a thread's current frame.
    """
    frames = [frame for frame, _ in _frames_of(trace)]
    for frame in reversed(frames):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_COLLECTIVES) and name not in _WRAPPERS:
            return f"the others in {name}()"
        if file == _REPLICAS:
            if any("_sync_buffers" in one.f_code.co_name for one in frames):
                return "the first rank's buffers"
            return f"the others in {name}() of DistributedDataParallel"
        if file.startswith(_BACKWARD):
            return "the reduction of gradients"
    return ""


def _frames_of(trace: TracebackType | FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a stack, innermost last."""
    if isinstance(trace, FrameType):
        return reversed(list(traceback.walk_stack(trace)))
    return traceback.walk_tb(trace)


@dataclass(frozen=True)
class Report:
    """The report of one rank.

    Attributes:
        beat: number of this report.
        block: how many `offload` blocks the rank has entered.
        status: its progress.
        machine: machine and process namespace.
        pid: its process id there.
        born: start time of the process, in ticks since boot.
        left: why it left the block: "" at a normal end, None if it is still inside.
    """

    beat: int
    block: int
    status: RankStatus
    machine: str
    pid: int
    born: int
    left: str | None = None

    def is_gone(self) -> bool:
        """Return whether its process is known to have ended; see [Note: processes]."""
        return self.machine == _machine() and _start_time(self.pid) != self.born


class StatusStore:
    """The reports of all ranks of the default process group.

    Args:
        block: how many `offload` blocks this process has entered.

    Attributes:
        rank: this process's rank.
        size: the number of ranks.
        reports: the last report of each other rank that has one.
        changed: when a rank's progress last changed, by this process's clock.
        heard: when a new report of it was last read, by the same clock.
        answers: whether the last read of the store succeeded.
    """

    def __init__(self, block: int) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store: Any = _get_default_store()
        self._store = store
        with contextlib.suppress(RuntimeError):  # a store that cannot be cloned
            self._store = store.clone()
            self._store.set_timeout(_STORE_TIMEOUT)
        self._block, self._beat = block, 0
        self._own = _machine(), os.getpid(), _start_time(os.getpid())
        self._known: set[int] = set()
        self._unreadable: set[int] = set()  # ranks for which a warning was logged
        self.reports: dict[int, Report] = {}
        self.changed: dict[int, float] = {}
        self.heard: dict[int, float] = {}
        self.answers = True

    def put(self, status: RankStatus, left: str | None = None) -> None:
        """Write this rank's report; ignore a store that fails."""
        self._beat += 1
        left = None if left is None else left[:_MAX_REASON]
        report = Report(self._beat, self._block, status, *self._own, left=left)
        with contextlib.suppress(RuntimeError):
            self._store.set(key(self.rank), json.dumps(asdict(report)))

    def update(self) -> None:
        """Read the other ranks' reports; sets ``answers`` to whether the store answered."""
        try:
            for rank in {*range(self.size)} - {self.rank} - self._known:
                if self._store.check([key(rank)]):
                    self._known.add(rank)
            known = sorted(self._known)
            texts = self._store.multi_get([key(rank) for rank in known]) if known else []
        except RuntimeError:
            self.answers = False
            return
        self.answers = True
        now = time.monotonic()
        for rank, text in zip(known, texts, strict=True):
            before = self.reports.get(rank)
            try:
                found: dict[str, Any] = json.loads(text)
                report = Report(**{**found, "status": RankStatus(**found["status"])})
                numbers = [report.beat, report.block, report.pid, report.born]
                numbers += [report.status.step, report.status.progress]
                if not all(isinstance(number, int) for number in numbers):
                    raise TypeError("a number of another type")
            except (ValueError, TypeError, LookupError) as error:  # such a rank counts as silent
                if rank not in self._unreadable:
                    self._unreadable.add(rank)
                    logger.warning(
                        "the status of rank %d cannot be read (%s): run the same version of "
                        "dynoffload on all ranks",
                        rank,
                        error,
                    )
                continue
            if before is None or (report.beat, report.pid) != (before.beat, before.pid):
                self.heard[rank] = now
            if before is None or (report.status, report.block) != (before.status, before.block):
                self.changed[rank] = now
            self.reports[rank] = report


def key(rank: int) -> str:
    """Return the key of a rank's report in the store."""
    return f"dynoffload/rank/{rank}"


def _machine() -> str:
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = str(os.getpid())  # other processes cannot be inspected
    return f"{socket.gethostname()} {space}"


def _start_time(pid: int) -> int:
    """Return the start time of a process, in ticks since boot; -1 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *values = file.read().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(values[18])
