"""Hard memory limits: runs processes in their own memory cgroup, with or without swap.

`memory_group` creates a cgroup (version 1 or 2) with a hard limit and reads the kernel's counters;
`swap_file` adds swap temporarily. Where the system does not allow this, `why_unavailable` returns
the reason, and nothing is measured. Names of groups and swap files contain the id of the process
that made them, so that the next run removes what a killed process left.
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
_REMOVAL_S = 10.0  # a group stays busy briefly after its last process has ended
_SWAPS = Path("/proc/swaps")
_VMSTAT = Path("/proc/vmstat")
_ROOTS = {1: Path("/sys/fs/cgroup/memory"), 2: Path("/sys/fs/cgroup")}


class LimitError(DynOffloadError, RuntimeError):
    """The system does not allow a memory limit, or swap under one."""


class _Files(NamedTuple):
    """File names of one cgroup version; "" where it has no such file."""

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
    """The kernel's counters of a group.

    Attributes:
        peak_bytes: maximum memory charged to the group, file cache included.
        limit_hits: how often the limit was reached and memory had to be reclaimed.
        oom_kills: processes killed because the group was out of memory.
    """

    peak_bytes: int
    limit_hits: int
    oom_kills: int


class MemoryGroup:
    """A memory cgroup; created by `memory_group`.

    Attributes:
        path: its directory.
        version: of the cgroup interface, 1 or 2.
        limit_bytes: its limit, None if unlimited.
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
        # Version 1 limits the sum of memory and swap; not every kernel supports it.
        if (self.path / files.swap).exists():
            self._write(files.swap, str(limit_bytes) if self.version == 1 else "0")
        if files.swappiness:
            self._write(files.swappiness, "0")

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that moves itself into the group and then executes ``command``."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self.path / "cgroup.procs"), *command]

    def usage(self) -> Usage:
        """Return the counters so far.

        Raises:
            LimitError: the kernel does not report the peak (version 2 before Linux 5.19).
        """
        peak = int(self._read(_FILES[self.version].peak))
        if self.version == 1:
            hits = int(self._read("memory.failcnt"))
            return Usage(peak, hits, self._counters("memory.oom_control").get("oom_kill", 0))
        events = self._counters("memory.events")
        return Usage(peak, events.get("max", 0), events.get("oom_kill", 0))

    def memory(self) -> tuple[int, int]:
        """Return the bytes of processes' own memory, and of the page cache."""
        stat = self._counters("memory.stat")
        names = ("rss", "cache") if self.version == 1 else ("anon", "file")
        own, cache = (stat.get(name, 0) for name in names)
        return own, cache

    def processes(self) -> list[int]:
        """Return the ids of the processes in the group."""
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
        """Kill the group's remaining processes and remove it."""
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
    """Return the cgroup version that controls memory here, None if none does."""
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
        swap: whether swap files are needed too.
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
    """Yield a new group; processes still in it at the end are killed.

    Args:
        limit_bytes: its hard limit; None only counts.
        swap: whether its memory may be swapped out. Otherwise anonymous pages stay in memory.

    Raises:
        LimitError: the system does not allow it; the text says why.
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
    """Add ``nbytes`` of swap to the system for the duration of the block.

    Only its owner can read the file. It is switched off and removed when the block ends, also
    after a termination signal; after a kill, the next call does it.

    Raises:
        LimitError: the file cannot be created or switched on; the text says why.
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
    """Return the bytes that all processes together have read from swap and written to it."""
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
            with contextlib.suppress(OSError):  # a process still runs in it
                path.rmdir()


def _remove_stale_swap(directory: Path) -> None:
    for path in directory.glob(f"{_SWAP}*"):
        if _maker_is_gone(path.name, _SWAP):
            logger.warning("switching off and removing %s, left by a killed process", path)
            _end_swap(path)


def _end_swap(path: Path, on: bool = False) -> None:
    """Switch off and remove a swap file; if it cannot be switched off, keep it and raise."""
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
    """Return whether a file is in use as swap. The kernel escapes spaces in file names."""
    for line in _SWAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]:
        name = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[0])
        with contextlib.suppress(OSError):  # in another mount namespace
            if path.samefile(name):
                return True
    return False
