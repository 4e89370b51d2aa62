"""System limits: memory, huge pages, whether the pager works, the spill directory's kind."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from dynoffload.memory.filesystems import mount_of
from dynoffload.memory.limits import available_bytes
from dynoffload.memory.spill import check_room


@dataclass(frozen=True)
class FileSystem:
    """File system of a directory: type, mount point, and bytes free for this user."""

    kind: str
    mount: str
    free_bytes: int


@dataclass(frozen=True)
class System:
    """System limits of this process; memory in bytes.

    Attributes:
        kernel: name and release.
        cores: usable by this process.
        memory_total: of the machine.
        memory_available: of the machine, without swapping.
        swap_total: of the machine.
        room: available to this process, within the machine's memory and its control groups.
        huge_pages: mode of transparent huge pages, None where the kernel has none.
        pager_refusal: why the pager cannot work here, ``""`` if it can.
        user_mode: whether the pager serves no faults inside system calls, which would need
            privileges or a sysctl.
    """

    kernel: str
    cores: int
    memory_total: int
    memory_available: int
    swap_total: int
    room: int
    huge_pages: str | None
    pager_refusal: str = ""
    user_mode: bool = False


def inspect() -> System:
    """Return the system limits of this process."""
    from dynoffload.memory.pager import in_user_mode, probe  # imports torch

    memory, refusal = psutil.virtual_memory(), probe()
    return System(
        kernel=f"{platform.system()} {platform.release()}",
        cores=len(os.sched_getaffinity(0)),
        memory_total=memory.total,
        memory_available=memory.available,
        swap_total=psutil.swap_memory().total,
        room=min(available_bytes(), memory.available),
        huge_pages=_huge_pages(),
        pager_refusal=refusal,
        user_mode=not refusal and in_user_mode(),
    )


def _huge_pages() -> str | None:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def filesystem_of(directory: Path) -> FileSystem:
    """Return the file system of ``directory``.

    Raises:
        SpillError: if it cannot hold a spill file.
    """
    check_room(directory, {})
    return FileSystem(*mount_of(directory), shutil.disk_usage(directory).free)
