"""Real limits on memory: processes in a memory cgroup of their own, with or without swap.

`memory_group` makes a cgroup (version 1 or 2) with a hard limit and reads what the kernel counted
in it, `swap_file` adds swap for as long as it is needed. Where the system does not let a process do
this, `why_unavailable` says why, and nothing is measured. Groups and swap files carry the number of
the process that made them, so that what a killed one left is cleared away by the next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dynoffload.errors import DynOffloadError
from dynoffload.termination import ended_by_signal
from dynoffload.units import MiB, format_bytes

logger = logging.getLogger(__name__)

_GROUP = "dynoffload-"
_SWAP = ".dynoffload-swap-"
_SWAP_TOOLS = ("mkswap", "swapon", "swapoff")
_REMOVAL_S = 10.0  # a group stays busy for a moment after its last process has died
_SWAPS = Path("/proc/swaps")
_VMSTAT = Path("/proc/vmstat")
_ROOTS = {1: Path("/sys/fs/cgroup/memory"), 2: Path("/sys/fs/cgroup")}


class LimitError(DynOffloadError, RuntimeError):
    """This system does not let a memory limit, or swap under one, be set."""


class _Files(NamedTuple):
    """The names of one version's files; "" where it has no such file."""

    limit: str
    peak: str
    swap: str
    swappiness: str


_V1 = ("limit_in_bytes", "max_usage_in_bytes", "memsw.limit_in_bytes", "swappiness")
_FILES = {
    1: _Files(*(f"memory.{name}" for name in _V1)),
    2: _Files("memory.max", "memory.peak", "memory.swap.max", ""),
}


@dataclass(frozen=True)
class Usage:
    """What the kernel counted in a group.

    Attributes:
        peak_bytes: the most it was charged with at any moment, file cache included.
        limit_hits: how often the limit was met, and memory had to be reclaimed.
        oom_kills: processes that were killed for want of memory.
    """

    peak_bytes: int
    limit_hits: int
    oom_kills: int


class MemoryGroup:
    """A memory cgroup; made by `memory_group`.

    Attributes:
        path: its directory.
        version: of the cgroup interface, 1 or 2.
        limit_bytes: its limit, None without.
    """

    def __init__(self, path: Path, version: int, limit_bytes: int | None, swap: bool) -> None:
        self.path, self.version, self.limit_bytes = path, version, limit_bytes
        files = _FILES[version]
        if limit_bytes is not None:
            self._write(files.limit, str(limit_bytes))
            if not swap:
                self._forbid_swap(files, limit_bytes)
        elif not swap and files.swappiness:
            self._write(files.swappiness, "0")

    def _forbid_swap(self, files: _Files, limit_bytes: int) -> None:
        # Version 1 counts memory and swap together, and not on every kernel.
        if (self.path / files.swap).exists():
            self._write(files.swap, str(limit_bytes) if self.version == 1 else "0")
        if files.swappiness:
            self._write(files.swappiness, "0")

    def command(self, command: Sequence[str]) -> list[str]:
        """Return ``command`` as one that first moves itself into the group."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self.path / "cgroup.procs"), *command]

    def usage(self) -> Usage:
        """Return what was counted so far.

        Raises:
            LimitError: the kernel does not keep the peak (version 2 before Linux 5.19).
        """
        peak = int(self._read(_FILES[self.version].peak))
        if self.version == 1:
            hits = int(self._read("memory.failcnt"))
            return Usage(peak, hits, self._counters("memory.oom_control").get("oom_kill", 0))
        events = self._counters("memory.events")
        return Usage(peak, events.get("max", 0), events.get("oom_kill", 0))

    def processes(self) -> list[int]:
        """Return the numbers of the processes in the group."""
        return [int(line) for line in self._read("cgroup.procs").split()]

    def _counters(self, name: str) -> dict[str, int]:
        pairs = [line.split() for line in self._read(name).splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="ascii")
        except OSError as error:
            raise LimitError(f"cannot read {self.path / name}: {error.strerror}") from error

    def _write(self, name: str, value: str) -> None:
        try:
            (self.path / name).write_text(value, encoding="ascii")
        except OSError as error:
            raise LimitError(
                f"cannot write {value} to {self.path / name}: {error.strerror}"
            ) from error

    def remove(self) -> None:
        """Kill what is left in the group and remove it."""
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        until = time.monotonic() + _REMOVAL_S
        while True:
            try:
                self.path.rmdir()
                return
            except OSError as error:
                if time.monotonic() > until:
                    logger.warning("cannot remove %s: %s", self.path, error.strerror)
                    return
            time.sleep(0.02)


def version() -> int | None:
    """Return the version of the cgroup interface that controls memory here, None if none does."""
    if (_ROOTS[1] / "memory.usage_in_bytes").exists():
        return 1
    controllers = _ROOTS[2] / "cgroup.subtree_control"
    try:
        return 2 if "memory" in controllers.read_text(encoding="ascii").split() else None
    except OSError:
        return None


def why_unavailable(*, swap: bool = False) -> str:
    """Return why memory cannot be limited here, "" if it can.

    Args:
        swap: whether swap files are wanted too.
    """
    if os.geteuid() != 0:
        return "limits on memory are set by root alone, and this is another user"
    found = version()
    if found is None:
        return f"no memory cgroup is mounted at {_ROOTS[1]} or enabled below {_ROOTS[2]}"
    if not os.access(_ROOTS[found], os.W_OK):
        return f"{_ROOTS[found]} is mounted read-only"
    missing = [tool for tool in _SWAP_TOOLS if shutil.which(tool) is None]
    if swap and missing:
        return f"there is no {' or '.join(missing)} to make a swap file with"
    return ""


@contextlib.contextmanager
def memory_group(limit_bytes: int | None, *, swap: bool = False) -> Iterator[MemoryGroup]:
    """Yield a new group; what is still running in it is killed at the end.

    Args:
        limit_bytes: its hard limit; None only counts.
        swap: whether its memory may be swapped out. Without, pages that are not of a file stay.

    Raises:
        LimitError: the system does not allow it; says why.
    """
    reason = why_unavailable()
    found = version()
    if reason or found is None:
        raise LimitError(f"no memory cgroup can be made: {reason}")
    root = _ROOTS[found]
    _remove_stale_groups(root)
    path = Path(tempfile.mkdtemp(prefix=f"{_GROUP}{os.getpid()}-", dir=root))
    try:
        group = MemoryGroup(path, found, limit_bytes, swap)
    except BaseException:
        path.rmdir()
        raise
    try:
        yield group
    finally:
        group.remove()


@contextlib.contextmanager
def swap_file(directory: Path, nbytes: int) -> Iterator[Path]:
    """Give the system ``nbytes`` more of swap for the time of the block.

    The file is private. It is switched off and removed however the block ends, also by a signal to
    terminate; after a kill, by the next call.

    Raises:
        LimitError: the file cannot be made or switched on; says why.
    """
    reason = why_unavailable(swap=True)
    if reason:
        raise LimitError(f"no swap file can be made: {reason}")
    _remove_stale_swap(directory)
    free = shutil.disk_usage(directory).free
    if free < nbytes + 64 * MiB:
        raise LimitError(
            f"{directory} has {format_bytes(free)} free, and a swap file of "
            f"{format_bytes(nbytes)} is needed: free some space, or name another directory"
        )
    with ended_by_signal():
        descriptor, name = tempfile.mkstemp(prefix=f"{_SWAP}{os.getpid()}-", dir=directory)
        on = False
        try:
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
            finally:
                os.close(descriptor)
            _tool("mkswap", name)
            _tool("swapon", name)
            on = True
            yield Path(name)
        finally:
            _end_swap(Path(name), on)


def swapped_bytes() -> tuple[int, int]:
    """Return the bytes that the system has read from swap and written to it, for all processes."""
    counts = dict(line.split() for line in _VMSTAT.read_text(encoding="ascii").splitlines())
    page = os.sysconf("SC_PAGE_SIZE")
    return int(counts["pswpin"]) * page, int(counts["pswpout"]) * page


def _tool(name: str, path: str) -> None:
    done = subprocess.run([name, path], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LimitError(f"{name} {path}: {done.stderr.strip() or done.returncode}")


def _maker_is_gone(name: str, prefix: str) -> bool:
    number = name.removeprefix(prefix).partition("-")[0]
    return number.isdigit() and not Path("/proc", number).exists()


def _remove_stale_groups(root: Path) -> None:
    for path in root.glob(f"{_GROUP}*"):
        if _maker_is_gone(path.name, _GROUP):
            with contextlib.suppress(OSError):  # something still runs in it
                path.rmdir()


def _remove_stale_swap(directory: Path) -> None:
    for path in directory.glob(f"{_SWAP}*"):
        if _maker_is_gone(path.name, _SWAP):
            logger.warning("switching off and removing %s, left by a killed process", path)
            _end_swap(path)


def _end_swap(path: Path, on: bool = False) -> None:
    """Remove a swap file; one that cannot be switched off keeps the name that this takes."""
    if on or _is_on(path):
        try:
            _tool("swapoff", str(path))
        except LimitError as error:
            raise LimitError(
                f"{error}; the file stays in use as swap: free memory, then run 'swapoff {path}' "
                "and remove it"
            ) from None
    path.unlink(missing_ok=True)


def _is_on(path: Path) -> bool:
    """Return whether a file is in use as swap. The kernel escapes spaces in names."""
    for line in _SWAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]:
        name = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[0])
        with contextlib.suppress(OSError):  # of another namespace
            if path.samefile(name):
                return True
    return False
