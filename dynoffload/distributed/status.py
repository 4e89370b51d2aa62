"""What a rank does, and how ranks tell one another: a report each, in the group's store.

A store is asked and answers; nothing here waits for another rank, so nothing hangs.

[Note: processes]  Ranks of one machine, which see one another's processes, are known to be gone as
soon as the process is; of others one knows that their report does not change any more.
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

_ANSWER = datetime.timedelta(seconds=5)  # of a store
_LONGEST = 200  # characters of a reason
_TORCH = os.path.dirname(torch.__file__) + os.sep
_COLLECTIVES = _TORCH + "distributed" + os.sep
_BACKWARD = _TORCH + "autograd" + os.sep
_REPLICAS = os.path.join(_TORCH + "nn", "parallel", "distributed.py")
_WRAPPERS = ("wrapper", "_time_logger", "wait")  # what says less than the frame that called it


@dataclass(frozen=True)
class RankStatus:
    """What one rank does.

    Attributes:
        step: optimizer steps that are complete.
        phase: ``"forward"`` or ``"backward"``; "" before the first.
        site: path of the module that was visited last; "" where none is watched.
        gradient: name of the parameter whose gradient was made last; "" before the first.
        progress: grows with all that happens; what stands still has the same.
    """

    step: int = 0
    phase: str = ""
    site: str = ""
    gradient: str = ""
    progress: int = 0

    def describe(self) -> str:
        """Return it in words, such as ``"step 12, backward, at layers.3"``."""
        parts = [f"step {self.step}"]
        if self.phase:
            parts.append(self.phase)
        if self.phase == "backward" and self.gradient:
            parts.append(f"with the gradient of {self.gradient!r} made last")
        elif self.site:
            parts.append(f"at {self.site!r}")
        return ", ".join(parts)


def awaited(trace: TracebackType | FrameType | None) -> str:
    """Return what the innermost call on a stack waits for of other ranks, "" if for nothing.

    Args:
        trace: of an error, or the frame in which a thread is now.
    """
    frames = [frame for frame, _ in _walked(trace)]
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


def _walked(trace: TracebackType | FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a stack, the innermost last."""
    if isinstance(trace, FrameType):
        return reversed(list(traceback.walk_stack(trace)))
    return traceback.walk_tb(trace)


@dataclass(frozen=True)
class Report:
    """What one rank has told.

    Attributes:
        beat: how many reports it had put up.
        block: how many blocks it had entered.
        status: what it did.
        machine: machine and process namespace.
        pid: its process there.
        born: when that was started, in ticks since the machine was.
        left: why it has left the block: "" at its end, None if it has not.
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
        return self.machine == _machine() and _born(self.pid) != self.born


class StatusStore:
    """The reports of all ranks of the default process group.

    Args:
        block: how many blocks this process has entered.

    Attributes:
        rank: this one.
        size: the number of ranks.
        reports: the last report of each other rank, as far as there is one.
        changed: when a rank's progress was last seen to change, by this process's clock.
        heard: when its report was.
        answers: whether the store has answered when it was asked last.
    """

    def __init__(self, block: int) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store: Any = _get_default_store()
        self._store = store
        with contextlib.suppress(RuntimeError):  # a store that knows no other client of itself
            self._store = store.clone()
            self._store.set_timeout(_ANSWER)
        self._block, self._beat = block, 0
        self._own = _machine(), os.getpid(), _born(os.getpid())
        self._known: set[int] = set()
        self._unreadable: set[int] = set()  # of which that was logged
        self.reports: dict[int, Report] = {}
        self.changed: dict[int, float] = {}
        self.heard: dict[int, float] = {}
        self.answers = True

    def put(self, status: RankStatus, left: str | None = None) -> None:
        """Put up this rank's report, if the store takes it."""
        self._beat += 1
        left = None if left is None else left[:_LONGEST]
        report = Report(self._beat, self._block, status, *self._own, left=left)
        with contextlib.suppress(RuntimeError):
            self._store.set(key(self.rank), json.dumps(asdict(report)))

    def update(self) -> None:
        """Read what the others have put up, if the store answers."""
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
        space = str(os.getpid())  # other processes cannot be looked at
    return f"{socket.gethostname()} {space}"


def _born(pid: int) -> int:
    """Return when a process was started, in ticks since the machine was; -1: it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *values = file.read().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(values[18])
