"""Measures the memory that this process can still take: system-wide and in its control groups."""

from __future__ import annotations

import os
from pathlib import Path

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
    available = _UNLIMITED
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for directory, limit_name, usage_name in cgroup_directories():
        limit, usage = _number(directory / limit_name), _number(directory / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            taken = usage - min(usage, _file_cache(directory))
            available = min(available, max(0, limit - taken))
    return available


def _file_cache(directory: Path) -> int:
    """Return a memory group's file cache in bytes, which the kernel reclaims before it refuses."""
    found: dict[str, int] = {}
    try:
        lines = (directory / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for name, number in (line.split() for line in lines):
        found[name] = int(number)
    return sum(
        found.get(f"total_{name}", found.get(name, 0)) for name in ("inactive_file", "active_file")
    )


def resident_bytes() -> int:
    """Return this process's resident set, in bytes."""
    file = os.open("/proc/self/statm", os.O_RDONLY)  # called often: no text layer
    try:
        fields = os.read(file, 256).split()
    finally:
        os.close(file)
    return int(fields[1]) * _PAGE


def file_bytes() -> int:
    """Return the bytes of it that are pages of files, such as libraries or mapped data."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    return 0
