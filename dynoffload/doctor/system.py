"""What this machine allows: memory limits, huge pages, userfaultfd, the spill directory's kind.

What it is: readers of /proc, /sys and the cgroup trees of both versions, and one probe of a system
call. What it is not: bandwidth (``tiers``), or advice (``verdict``). Each reader takes the root of
the file system it reads, so that trees of other machines can be read too. What a system does not
tell is ``None``, never a guess.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import struct
from dataclasses import dataclass
from pathlib import Path

from dynoffload.errors import SpillError
from dynoffload.memory.filesystems import MEMORY_FILESYSTEMS, mount_of, mounts

_UFFD_SYSCALL = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
_UFFD_USER_MODE_ONLY = 1
_UFFDIO_API = 0xC018AA3F
_UFFD_API = 0xAA
_FEATURE_WP_ASYNC = 1 << 15
_FEATURE_MOVE = 1 << 16
_NO_LIMIT = 2**60  # cgroup v1 says "none" by a count of pages near 2**63


@dataclass(frozen=True)
class CgroupMemory:
    """The memory limit that binds this process.

    Attributes:
        version: 1 or 2.
        path: directory of the group whose limit leaves the least room.
        limit: bytes, ``None`` if no group on the way to the root has one.
        usage: bytes charged to that group now, file cache included.
        reclaimable: bytes of that usage which are file cache the kernel can drop.
    """

    version: int
    path: str
    limit: int | None
    usage: int
    reclaimable: int

    @property
    def room(self) -> int | None:
        """Bytes that can still be charged, or ``None`` without a limit."""
        if self.limit is None:
            return None
        return max(0, self.limit - max(0, self.usage - self.reclaimable))


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
class Limits:
    """Limits of this process and switches of the kernel that paging runs into.

    Attributes:
        overcommit: ``vm.overcommit_memory``: 0 heuristic, 1 always, 2 never.
        max_map_count: most mappings of one process.
        address_space: ``ulimit -v`` in bytes, ``None`` without limit.
        locked: ``ulimit -l`` in bytes, ``None`` without limit.
        open_files: ``ulimit -n``, ``None`` without limit.
    """

    overcommit: int | None
    max_map_count: int | None
    address_space: int | None
    locked: int | None
    open_files: int | None


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
    """All of it; see the parts. ``memory_total`` and ``memory_available`` are bytes."""

    kernel: str
    cores: int
    memory_total: int | None
    memory_available: int | None
    swap_total: int | None
    cgroup: CgroupMemory | None
    huge_pages: str | None
    userfaultfd: Userfaultfd
    limits: Limits


def inspect(root: Path = Path("/")) -> System:
    """Return what the system whose files lie under ``root`` allows this process."""
    memory = read_meminfo(root)
    return System(
        kernel=f"{platform.system()} {platform.release()}",
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        swap_total=memory.get("SwapTotal"),
        cgroup=read_cgroup(root),
        huge_pages=read_huge_pages(root),
        userfaultfd=probe_userfaultfd(),
        limits=read_limits(root),
    )


def read_meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty where there is none."""
    values: dict[str, int] = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def read_huge_pages(root: Path = Path("/")) -> str | None:
    """Return the mode of transparent huge pages: ``"always"``, ``"madvise"`` or ``"never"``."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = [word[1:-1] for word in text.split() if word.startswith("[") and word.endswith("]")]
    return chosen[0] if chosen else None


def read_limits(root: Path = Path("/")) -> Limits:
    """Return the limits of this process and the switches under ``root``."""

    def soft(kind: int) -> int | None:
        limit = resource.getrlimit(kind)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    return Limits(
        overcommit=_number(root / "proc/sys/vm/overcommit_memory"),
        max_map_count=_number(root / "proc/sys/vm/max_map_count"),
        address_space=soft(resource.RLIMIT_AS),
        locked=soft(resource.RLIMIT_MEMLOCK),
        open_files=soft(resource.RLIMIT_NOFILE),
    )


def read_cgroup(root: Path = Path("/")) -> CgroupMemory | None:
    """Return the memory limit that leaves the least room, of this process's groups up to the root.

    Both versions are read, each through its mounts as a container sees them: the path that
    /proc/self/cgroup names is taken relative to the root of the mount.
    """
    found: list[CgroupMemory] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            version, kind, option = 2, "cgroup2", ""
        elif "memory" in controllers.split(","):
            version, kind, option = 1, "cgroup", "memory"
        else:
            continue
        for mount_root, mount in _cgroup_mounts(root, kind, option):
            found += _groups(root, version, mount_root, mount, path)
    if not found:
        return None
    limited = [group for group in found if group.limit is not None]
    return min(limited, key=lambda g: g.room or 0) if limited else found[0]


def filesystem_of(directory: Path, root: Path = Path("/")) -> FileSystem:
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
    kind, mount = mount_of(directory, root)
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


def _groups(root: Path, version: int, mount_root: str, mount: str, path: str) -> list[CgroupMemory]:
    """Return the group ``path`` and those above it, up to the root of the mount."""
    top = root / mount.lstrip("/")
    relative = os.path.relpath(path, mount_root)
    here = top if relative.startswith("..") else top / relative
    if not here.is_dir():
        here = top  # seen from inside a namespace: the mount shows the own group
    groups: list[CgroupMemory] = []
    while True:
        group = _group(here, version)
        if group is not None:
            groups.append(group)
        if here == top or top not in here.parents:
            return groups
        here = here.parent


def _group(directory: Path, version: int) -> CgroupMemory | None:
    names = (
        ("memory.max", "memory.current", ("inactive_file", "active_file"))
        if version == 2
        else (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"),
        )
    )
    usage = _number(directory / names[1])
    if usage is None:
        return None
    limit = _number(directory / names[0])
    statistics = dict(
        line.split()[:2]
        for line in (_read(directory / "memory.stat") or "").splitlines()
        if len(line.split()) == 2
    )
    reclaimable = sum(int(statistics.get(name, 0)) for name in names[2])
    if limit is not None and limit >= _NO_LIMIT:
        limit = None
    return CgroupMemory(version, str(directory), limit, usage, reclaimable)


def _cgroup_mounts(root: Path, kind: str, option: str) -> list[tuple[str, str]]:
    """Return (root of the mount, mount point) of each cgroup mount of ``kind`` with ``option``."""
    return [
        (fields[3], fields[4])
        for fields, after in mounts(root)
        if after[0] == kind and (not option or option in after[-1].split(","))
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None
