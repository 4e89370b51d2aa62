"""Measures the memory that this process can still take: system-wide and in its control groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def cgroup_directories() -> list[tuple[Path, str, str]]:
    """Return (directory, limit file, usage file) of this process's memory groups, v1 and v2."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, names = (Path("/sys/fs/cgroup"),), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            roots = (Path("/sys/fs/cgroup/memory"),)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for root in roots:
            directory = root / path.lstrip("/")
            while True:
                if (directory / names[0]).exists():
                    found.append((directory, *names))
                if directory == root or root not in directory.parents:
                    break
                directory = directory.parent
    return found


def available_bytes() -> int:
    """Return the bytes this process can take before an allocation fails or it is killed."""
    return min(system_room(), MemoryGroups().room().left)


def system_room(code: int = 0) -> int:
    """Return the bytes available in the system, less up to ``code`` bytes of mapped files that
    stay in memory."""
    text = _read("/proc/meminfo")
    return _kilobytes(text, b"\nMemAvailable:") - min(code, _kilobytes(text, b"\nMapped:"))


class Room(NamedTuple):
    """A control group's limit, and the bytes left below it."""

    left: int
    limit: int


class MemoryGroups:
    """The control groups of this process that have a limit."""

    def __init__(self) -> None:
        self._groups = [
            (directory, str(directory / limit), str(directory / usage))
            for directory, limit, usage in cgroup_directories()
            if (_number(directory / limit) or _UNLIMITED) < _UNLIMITED
        ]

    def room(self, code: int = 0) -> Room:
        """Return the room of the group with the least left, less up to ``code`` bytes of mapped
        files that stay in memory."""
        room = Room(_UNLIMITED, _UNLIMITED)
        for directory, limit_file, usage_file in self._groups:
            limit, usage = _whole(limit_file), _whole(usage_file)
            if limit >= _UNLIMITED:
                continue
            stat = _statistics(directory)
            taken = usage - min(usage, stat("inactive_file") + stat("active_file"))
            kept = min(code, stat("mapped_file") or stat("file_mapped"))  # in version 1, or 2
            room = min(room, Room(max(0, limit - taken - kept), limit))
        return room

    def may_lack(self, spare: int) -> bool:
        """Return whether a group may have less than ``spare`` bytes left; takes microseconds.

        File cache counts as used here, so confirm it by `room`.
        """
        return any(_whole(limit) - _whole(usage) < spare for _, limit, usage in self._groups)


def _whole(file: str) -> int:
    try:
        text = _read(file).strip()
    except OSError:  # the process left the group, which is gone
        return _UNLIMITED
    return int(text) if text.isdigit() else _UNLIMITED


def _statistics(directory: Path) -> Callable[[str], int]:
    """Return a function that returns a number of bytes of a memory group by its name."""
    try:
        text = (directory / "memory.stat").read_text(encoding="ascii")
    except OSError:
        text = ""
    found = {name: int(number) for name, number in map(str.split, text.splitlines())}
    return lambda name: found.get(f"total_{name}", found.get(name, 0))


def resident_bytes() -> int:
    """Return this process's resident set, in bytes."""
    return int(_read("/proc/self/statm").split()[1]) * _PAGE


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)  # called often: no text layer
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)


def _kilobytes(text: bytes, name: bytes) -> int:
    """Return in bytes what a file of the system gives in kB under ``name``; 0 without it."""
    at = text.find(name)
    return 0 if at < 0 else int(text[at + len(name) :].split(None, 1)[0]) * 1024


def file_bytes() -> int:
    """Return the bytes of the resident set that are pages of files, such as libraries."""
    return _kilobytes(_read("/proc/self/status"), b"\nRssFile:")
