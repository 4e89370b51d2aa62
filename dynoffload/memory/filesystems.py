"""Which file system a directory lies on, whether that is memory itself, and room in its files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from pathlib import Path

from dynoffload.memory.libc import libc

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems that keep their files in memory: spilling to them frees nothing."""


def take_room(fd: int, start: int, stop: int) -> None:
    """Give the file ``fd`` room on the disk from byte ``start`` to ``stop``, where it then ends.

    Where the file system cannot (NFS 3, for one) the file is only made longer. The C library's
    ``posix_fallocate`` would write to every block there.

    Raises:
        OSError: the disk is full, or a quota reached; the file ends at ``start``, and the room that
            there was is free again.
    """
    while libc().fallocate(fd, 0, start, stop - start):
        error = ctypes.get_errno()
        if error in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.ftruncate(fd, stop)
            return
        if error != errno.EINTR:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, start)
            raise OSError(error, os.strerror(error))


def mounts(root: Path = Path("/")) -> list[tuple[list[str], list[str]]]:
    """Return /proc/self/mountinfo under ``root``: each line's fields before and after its
    separator, unescaped; empty where there is none."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = [field.replace("\\040", " ").replace("\\011", "\t") for field in before.split()]
        if separator and len(fields) >= 5 and after.split():
            found.append((fields, after.split()))
    return found


def mount_of(directory: Path, root: Path = Path("/")) -> tuple[str, str]:
    """Return the type and the mount point of the file system that holds ``directory``."""
    place = os.path.realpath(directory)
    kind, mount = "unknown", "/"
    for fields, after in mounts(root):
        point = fields[4]
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(mount):  # of mounts on one point the last is seen
            kind, mount = after[0], point
    return kind, mount


def filesystem_of(directory: Path) -> str:
    """Return the type of the file system that holds ``directory``, e.g. ``"ext4"``."""
    return mount_of(directory)[0]


def why_not_temporary(directory: Path) -> str:
    """Return why ``directory`` was taken for the system's for temporary files, or ``""`` if it is
    that one."""
    temporary = Path(tempfile.gettempdir())
    kind = filesystem_of(temporary)
    if directory == temporary or kind not in MEMORY_FILESYSTEMS:
        return ""
    return f"as the one for temporary files, {temporary}, is on {kind}, which is memory itself"
