"""Finds the file system of a directory, and allocates disk space for files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from pathlib import Path

from dynoffload.memory.libc import libc

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems that keep files in memory: spilling to them frees nothing."""


def take_room(fd: int, start: int, stop: int) -> None:
    """Allocate disk space for the file ``fd`` from byte ``start`` to ``stop``, where it then ends.

    A file system that cannot (such as NFS 3) only extends the file. The C library's
    ``posix_fallocate`` would write to every block there.

    Raises:
        OSError: the disk is full, or a quota is reached; the file is truncated to ``start`` again.
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
    """Return /proc/self/mountinfo under ``root``: each line's unescaped fields before and after
    its separator; empty if it cannot be read."""
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
        if inside and len(point) >= len(mount):  # the last mount on a point hides the others
            kind, mount = after[0], point
    return kind, mount


def filesystem_of(directory: Path) -> str:
    """Return the type of the file system that holds ``directory``, e.g. ``"ext4"``."""
    return mount_of(directory)[0]


def why_not_temporary(directory: Path) -> str:
    """Return why ``directory`` is used in place of the system's temporary directory, or ``""`` if
    it is that one."""
    temporary = Path(tempfile.gettempdir())
    kind = filesystem_of(temporary)
    if directory == temporary or kind not in MEMORY_FILESYSTEMS:
        return ""
    return f"as the one for temporary files, {temporary}, is on {kind}, which is memory itself"
