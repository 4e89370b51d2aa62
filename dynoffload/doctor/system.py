"""What this machine allows: memory, huge pages, the pager, the spill directory's kind."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from dynoffload.errors import SpillError
from dynoffload.memory.filesystems import MEMORY_FILESYSTEMS, mount_of
from dynoffload.memory.limits import available_bytes


@dataclass(frozen=True)
class FileSystem:
    """Where a directory lies: type, mount point, and bytes free for this user."""

    kind: str
    mount: str
    free_bytes: int

    @property
    def in_memory(self) -> bool:
        """Whether its files lie in memory, so that nothing is gained by spilling there."""
        return self.kind in MEMORY_FILESYSTEMS


@dataclass(frozen=True)
class System:
    """What the system allows this process; memory in bytes.

    Attributes:
        kernel: its name and release.
        cores: that this process may use.
        memory_total: of the machine.
        memory_available: of the machine, without swapping.
        swap_total: of the machine.
        room: that this process may take, by the machine and by its control groups.
        huge_pages: mode of transparent huge pages, None where the kernel has none.
        pager_refusal: why the pager cannot work here, ``""`` if it can.
        user_mode: whether the pager serves no faults inside of system calls, which takes privilege
            or a sysctl.
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
    """Return what the system allows this process."""
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
    """Return the file system that ``directory`` lies on.

    Raises:
        SpillError: if it does not exist, is no directory, or cannot be written to.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise SpillError(
            f"spill directory {directory} {what}; create it, or name another by --spill-dir"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SpillError(
            f"spill directory {directory} cannot be written by this user; "
            f"name another by --spill-dir"
        )
    kind, mount = mount_of(directory)
    space = os.statvfs(directory)
    return FileSystem(kind, mount, space.f_bavail * space.f_frsize)
