"""What this machine allows: memory, huge pages, userfaultfd, the spill directory's kind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from dataclasses import dataclass
from pathlib import Path

import psutil

from dynoffload.errors import SpillError
from dynoffload.memory.filesystems import MEMORY_FILESYSTEMS, mount_of
from dynoffload.memory.limits import available_bytes

_UFFD_SYSCALL = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
_UFFD_USER_MODE_ONLY = 1
_UFFDIO_API = 0xC018AA3F
_UFFD_API = 0xAA
_FEATURE_WP_ASYNC = 1 << 15
_FEATURE_MOVE = 1 << 16


@dataclass(frozen=True)
class Userfaultfd:
    """What this process may do with userfaultfd.

    Attributes:
        available: whether a descriptor can be had at all.
        full: whether faults inside system calls are served too (needs privilege or a sysctl).
        move: whether pages can be moved without copying (``UFFDIO_MOVE``, Linux 6.8).
        wp_async: whether the kernel tells which pages were written (Linux 6.7).
        reason: why it is not available, ``""`` if it is.
    """

    available: bool
    full: bool
    move: bool
    wp_async: bool
    reason: str = ""


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
        userfaultfd: what this process may do with it.
    """

    kernel: str
    cores: int
    memory_total: int
    memory_available: int
    swap_total: int
    room: int
    huge_pages: str | None
    userfaultfd: Userfaultfd


def inspect() -> System:
    """Return what the system allows this process."""
    memory = psutil.virtual_memory()
    return System(
        kernel=f"{platform.system()} {platform.release()}",
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_total=memory.total,
        memory_available=memory.available,
        swap_total=psutil.swap_memory().total,
        room=available_bytes(),
        huge_pages=_huge_pages(),
        userfaultfd=probe_userfaultfd(),
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


def probe_userfaultfd() -> Userfaultfd:
    """Ask for a userfaultfd, with and without faults inside system calls, and close it."""
    number = _UFFD_SYSCALL.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return Userfaultfd(
            False, False, False, False, f"not on {platform.system()} {platform.machine()}"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    reason = ""
    for user_mode in (0, _UFFD_USER_MODE_ONLY):
        flags = os.O_CLOEXEC | os.O_NONBLOCK | user_mode
        descriptor = libc.syscall(ctypes.c_long(number), ctypes.c_long(flags))
        if descriptor < 0:
            reason = errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))
            continue
        try:
            features = _uffd_features(descriptor)
        except OSError as error:
            reason = f"UFFDIO_API: {error.strerror}"
            continue
        finally:
            os.close(descriptor)
        return Userfaultfd(
            available=True,
            full=not user_mode,
            move=bool(features & _FEATURE_MOVE),
            wp_async=bool(features & _FEATURE_WP_ASYNC),
        )
    return Userfaultfd(False, False, False, False, f"userfaultfd(2) refused: {reason}")


def _uffd_features(descriptor: int) -> int:
    """Return the feature bits the kernel offers (``UFFDIO_API`` asked with none wanted)."""
    answer = bytearray(struct.pack("QQQ", _UFFD_API, 0, 0))
    fcntl.ioctl(descriptor, _UFFDIO_API, answer)
    return int(struct.unpack("QQQ", answer)[1])
