"""Watchdog that reports a lost rank: which one, its last status, and what the others waited for.

`RankWatchdog` runs a thread for a session of several processes. Each second it writes this rank's
status; it also reads the others'. It turns the error of a collective that failed in the block into
a `RankError` that names the lost rank. It issues no collectives; ranks may take different paths.

[Note: who ends a wait]  A collective fails when another rank's connection closes or the group's
timeout expires. It then raises in the waiting thread, and the end of the block explains the error.
Some waits cannot be interrupted. If one outlasts the timeout plus a margin, and another rank has
made no progress for longer than the timeout, a warning reports what is known. With ``rank_timeout``
the process then exits; without it the process keeps waiting, since a user's group may allow hours.
The spill file is unnamed, so it disappears with the process.

[Note: the group's timeout]  Within the block, ``rank_timeout`` is set as the timeout of the process
groups, so that normally the group ends a wait.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from dynoffload.distributed.status import RankStatus, StatusStore, awaited
from dynoffload.errors import ExchangeError, RankError

logger = logging.getLogger(__name__)

ENDED = 70
"""Exit code of a process that could not leave a wait; see [Note: who ends a wait]."""

_BEAT_S = 1.0
_FIRST_S = 0.1  # between first reads, times the usual interval, until every rank has reported
_FIRST_LOOKS = 100
_SILENT_BEATS = 4
_PATIENCE_S = 5.0  # to identify the lost rank, once a collective has failed
_PATIENCE_AFTER_S = 1.5  # the same after a timeout, when much is already known
_MOMENT_S = 5.0  # beyond the timeout, for the group to end the wait itself
_RANKS_A_SECOND = 16  # that one rank queries
_TIMED_OUT = re.compile(r"tim(?:ed|e) ?out", re.IGNORECASE)
_OF_GROUP = re.compile(
    r"gloo/|\bNCCL|ProcessGroup(?:Gloo|NCCL|MPI|UCC|Wrapper)|remote worker|Timed out waiting"
    "|[Cc]onnection (?:closed|reset) by peer"
)

_blocks_entered = 0  # entered by this process


def watch_ranks(
    status: Callable[[], RankStatus], timeout_s: float | None, groups: Iterable[Any]
) -> RankWatchdog | None:
    """Return a started watchdog; None for a single process, or without a process group.

    Args:
        status: returns this rank's status; called from another thread.
        timeout_s: how long a rank may keep the others waiting; None: the group's timeout.
        groups: the model's process groups, in addition to the default one.
    """
    global _blocks_entered
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    _blocks_entered += 1
    return RankWatchdog(status, timeout_s, groups, _blocks_entered)


class RankWatchdog:
    """See `watch_ranks`."""

    def __init__(
        self,
        status: Callable[[], RankStatus],
        timeout_s: float | None,
        groups: Iterable[Any],
        block: int,
    ) -> None:
        self._status, self._block = status, block
        self._store = StatusStore(block)
        self._before = _set_timeout(timeout_s, groups)
        self._timeout_s = timeout_s or _timeout_of_group()
        self._may_exit = timeout_s is not None
        self._main = threading.get_ident()
        self._ends = threading.Event()
        self._mutex = threading.Lock()
        self._progress, self._since = -1, time.monotonic()
        self._looked = self._warned = -1.0
        self._store.put(status())
        self._thread = threading.Thread(target=self._run, name="dynoffload-ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        every = max(_BEAT_S, self._store.size / _RANKS_A_SECOND)
        failed = False
        for looks in itertools.count():
            begins = looks < _FIRST_LOOKS and len(self._store.reports) < self._store.size - 1
            if self._ends.wait(_FIRST_S * every if begins else _BEAT_S):
                return
            try:
                if begins:
                    with self._mutex:
                        self._store.update()
                else:
                    self._report(every)
            except Exception as error:
                if not failed:
                    logger.warning("the rank watchdog goes on after %r", error, exc_info=True)
                failed = True

    def _report(self, every: float) -> None:
        status, now = self._status(), time.monotonic()
        if status.progress != self._progress:
            self._progress, self._since = status.progress, now
        with self._mutex:
            if self._ends.is_set():
                return
            self._store.put(status)
            if now - self._looked >= every:
                self._looked = now
                self._store.update()
        if now - self._since > self._timeout_s + _MOMENT_S:
            self._check_wait(status, now)

    def _check_wait(self, status: RankStatus, now: float) -> None:
        """Warn of, or end, a wait that lasts too long; see [Note: who ends a wait]."""
        waits = awaited(sys._current_frames().get(self._main))
        late = [r for r in self._others() if self._idle_s(r, now) > self._timeout_s]
        if not waits or not late or self._ends.is_set():
            return
        if not self._may_exit:
            if self._warned != self._progress:
                self._warned = self._progress
                logger.warning(
                    "rank %d (%s) has waited for %s for %.0f s: %s. It goes on waiting; "
                    "config={'rank_timeout': seconds} ends the process with code %d instead",
                    self._store.rank,
                    status.describe(),
                    waits,
                    now - self._since,
                    self._describe(late, now),
                    ENDED,
                )
            return
        message = self._message(status, waits, late, now)
        logger.error("%s; this wait cannot be ended from outside, so the process ends", message)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):
                stream.flush()
        os._exit(ENDED)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._store.size) if rank != self._store.rank]

    def _idle_s(self, rank: int, now: float) -> float:
        """Return the seconds since a rank last made progress; huge if it has never reported."""
        return now - self._store.changed.get(rank, -1e9)

    # The end

    def explain(self, error: BaseException) -> RankError | None:
        """Return the error to raise in place of ``error``; None if it is not of a process group."""
        if isinstance(error, RankError) or not _is_of_group(error):
            return None
        status = self._status()
        waits = awaited(error.__traceback__) or "the others"
        lost, now = self._lost(_PATIENCE_AFTER_S if _timed_out(error) else _PATIENCE_S)
        if not lost:
            known = [rank for rank in self._others() if rank in self._store.reports]
            lost = [r for r in known if self._idle_s(r, now) > _SILENT_BEATS * _BEAT_S] or known
        found = RankError(self._message(status, waits, lost, now))
        found.rank, found.lost = self._store.rank, tuple(lost)
        return found

    def _lost(self, patience_s: float) -> tuple[list[int], float]:
        """Return the ranks that are gone, have left or are silent, as soon as there are any."""
        until = time.monotonic() + patience_s
        while True:
            with self._mutex:
                self._store.update()
            now = time.monotonic()
            gone = [rank for rank in self._others() if self._is_lost(rank, now)]
            if gone or now > until:
                return gone, now
            time.sleep(0.05)

    def _is_lost(self, rank: int, now: float) -> bool:
        report = self._store.reports.get(rank)
        if report is None:
            return False
        silent = now - self._store.heard[rank] > _SILENT_BEATS * _BEAT_S
        return (
            report.is_gone() or silent or (report.left is not None and report.block >= self._block)
        )

    def _message(self, status: RankStatus, waits: str, lost: Iterable[int], now: float) -> str:
        return (
            f"rank {self._store.rank} ({status.describe()}) waited for {waits}, and in vain: "
            f"{self._describe(lost, now)}. The step is lost: end all ranks, and go on from the "
            "last checkpoint"
        )

    def _describe(self, ranks: Iterable[int], now: float) -> str:
        return "; ".join(self._describe_rank(rank, now) for rank in ranks) or (
            "no other rank has reported"
            if self._store.answers
            else "the process group's store does not answer, which the first rank holds unless a "
            "launcher does"
        )

    def _describe_rank(self, rank: int, now: float) -> str:
        report = self._store.reports.get(rank)
        if report is None:
            return f"rank {rank} has entered no offload() block"
        status = report.status.describe()
        if report.left:
            return f"rank {rank} has left its block by an error ({report.left}) in {status}"
        if report.left is not None and report.block >= self._block:
            return f"rank {rank} has left its block, after {report.status.step} steps"
        silent = now - self._store.heard[rank]
        if report.is_gone():
            return (
                f"rank {rank} is gone, its process {report.pid} has ended; last heard of "
                f"{silent:.0f} s ago, in {status}"
            )
        if silent > _SILENT_BEATS * _BEAT_S:
            return f"rank {rank} has been silent for {silent:.0f} s, last heard of in {status}"
        if report.block < self._block or report.left is not None:
            return f"rank {rank} has not entered its block"
        return f"rank {rank} runs, and has been for {self._idle_s(rank, now):.0f} s in {status}"

    def end(self, error: BaseException | None) -> None:
        """Stop the watchdog, and report to the other ranks how the block ended."""
        self._ends.set()
        left = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            with self._mutex:
                self._store.put(self._status(), left)
        finally:
            self._thread.join(_BEAT_S)
            for group, timeout in self._before:
                with contextlib.suppress(RuntimeError, ValueError):  # it was destroyed meanwhile
                    _set(group, timeout)


def _is_of_group(error: BaseException) -> bool:
    import torch.distributed as dist

    if isinstance(error, dist.DistError | ExchangeError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_GROUP.search(str(error)))


def _timed_out(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports a timeout."""
    while error is not None:
        if _TIMED_OUT.search(str(error)):
            return True
        error = error.__cause__
    return False


def _timeout_of_group() -> float:
    import torch.distributed as dist

    try:
        return float(_backend(dist.group.WORLD).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend that exposes no timeout
        return dist.default_pg_timeout.total_seconds()


def _backend(group: Any) -> Any:
    import torch

    devices = group._device_types
    kind = torch.device("cpu") if torch.device("cpu") in devices else devices[0]
    return group._get_backend(kind)


def _set_timeout(
    timeout_s: float | None, groups: Iterable[Any]
) -> list[tuple[Any, datetime.timedelta]]:
    """Set the timeout of the default group and of ``groups``; return the previous ones."""
    if timeout_s is None:
        return []
    import torch.distributed as dist

    before = []
    for group in {id(one): one for one in (dist.group.WORLD, *groups)}.values():
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend that has no timeout
            before.append((group, _backend(group).options._timeout))
            _set(group, datetime.timedelta(seconds=timeout_s))
    return before


def _set(group: Any, timeout: datetime.timedelta) -> None:
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)
