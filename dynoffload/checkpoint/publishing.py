"""Replaces a directory by another atomically.

A save writes to a new directory next to the target, and then exchanges the two by one system call
(``renameat2`` with ``RENAME_EXCHANGE``). So a save killed at any time leaves either the old or the
new checkpoint. If the file system cannot exchange, the target is renamed twice. A save killed
between the two leaves the old checkpoint under a second name; `located` finds it there, and the
next save puts it back.

The new directory is locked while it is written. An unlocked one is left over from a killed save,
and the next save removes it. (Where directories cannot be locked, as on some network file systems,
two processes must not save to one target at the same time.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from dynoffload.checkpoint import manifest
from dynoffload.errors import CheckpointError, DynOffloadError
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)

OURS = re.compile(
    r"checkpoint\.json"
    r"|(model|optimizer|extra)(-\d{5,}-of-\d{5,})?\.safetensors"
    r"|(model|optimizer|extra)\.safetensors\.index\.json"
)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def target_of(directory: str | os.PathLike[str]) -> Path:
    """Return the directory as an absolute path, with links resolved."""
    return Path(directory).expanduser().resolve()


def located(target: Path) -> Path:
    """Return where the checkpoint of ``target`` is: there, or under the second name that a killed
    save may leave on a file system without exchange."""
    replaced = _replaced(target)
    return replaced if not target.exists() and replaced.is_dir() else target


@contextlib.contextmanager
def replacing(target: Path, need: int) -> Iterator[Path]:
    """Yield a new directory that replaces ``target`` when the block ends without error.

    Other files in the old directory (``config.json``, a tokenizer) are carried over.

    Args:
        target: as returned by `target_of`; it need not exist.
        need: bytes that will be written.

    Raises:
        CheckpointError: the target cannot be replaced, or the disk failed. The old checkpoint is
            unchanged, unless the message says that the new one is saved.
    """
    leftover: Path | None = None
    lock, swapped = -1, False
    try:
        _check(target)
        _clean(target)
        _check_room(target, need)
        leftover, lock = _make(target)
        _carry_over(target, leftover)
        yield leftover
        sync(leftover)
        _swap(leftover, target)
        swapped, old, leftover = True, leftover, None  # kept until the swap is durable
        sync(target.parent)
        leftover = old
    except OSError as error:
        if isinstance(error, DynOffloadError):
            raise
        why = error.strerror or error
        raise CheckpointError(
            error.errno or errno.EIO,
            f"checkpoint {target} is saved, but the disk may forget it if power fails now ({why}): "
            "check that disk, and save again"
            if swapped
            else f"cannot save checkpoint {target} ({why}): {_remedy(error)}; what was saved there "
            "before is as it was",
        ) from error
    finally:
        if leftover is not None:
            _remove(leftover)
            if target.exists():
                _remove(_replaced(target))
        if lock >= 0:
            os.close(lock)


def sync(path: Path) -> None:
    """Write the directory entries of ``path`` to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check(target: Path) -> None:
    """Check that the target is absent, or a directory that can be replaced."""
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            error.errno,
            f"cannot save checkpoint {target}: directory {parent} does not exist, and cannot be "
            f"made ({error.strerror}); name another",
        ) from error
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(
            errno.ENOTDIR, f"cannot save checkpoint {target}: it is a file; name a directory"
        )
    entries = list(os.scandir(target))
    foreign = sorted(entry.name for entry in entries if OURS.fullmatch(entry.name))
    with contextlib.suppress(OSError), open(target / manifest.NAME, "rb") as file:
        if manifest.is_manifest(file.read(64)):
            foreign = []
    why, is_cwd = "", False
    with contextlib.suppress(OSError):
        is_cwd = target.samefile(os.curdir)
    if any(entry.is_dir(follow_symlinks=False) for entry in entries):
        why = "it has directories in it"
    elif is_cwd:
        why = "it is the working directory"
    elif foreign:
        why = f"it has {foreign[0]}, which is of no checkpoint of dynoffload"
    if why:
        raise CheckpointError(
            errno.EEXIST,
            f"cannot save checkpoint {target}: {why}, and the whole directory would be replaced; "
            "name a directory that is the checkpoint's own",
        )


def _check_room(target: Path, need: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < need:
        raise CheckpointError(
            errno.ENOSPC,
            f"checkpoint {target} needs {format_bytes(need)}, as the one before stays until it is "
            f"complete, but {target.parent} has {format_bytes(free)} free: free space there, or "
            "save to another disk",
        )


def _remedy(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the directory above it writable, or save elsewhere"
    if error.errno == errno.EBUSY:
        return "it is a mount point, which nothing can replace: name a directory inside it"
    return "free space there, raise the limit, or save to another disk"


# The new directory


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-"


def _make(target: Path) -> tuple[Path, int]:
    """Return a new directory and its lock."""
    while True:
        new = target.parent / f"{_prefix(target)}{secrets.token_hex(4)}"
        os.mkdir(new)
        lock = _locked(new)
        if lock is not None:
            return new, lock


def _carry_over(target: Path, new: Path) -> None:
    """Give the new directory the target's mode and its foreign files."""
    if not target.exists():
        return
    os.chmod(new, stat.S_IMODE(target.stat().st_mode))
    for entry in os.scandir(target):
        if not OURS.fullmatch(entry.name):
            try:
                os.link(entry.path, new / entry.name, follow_symlinks=False)
            except OSError:  # no links here
                shutil.copy2(entry.path, new / entry.name, follow_symlinks=False)


def _locked(path: Path) -> int | None:
    """Return a descriptor that locks the directory at ``path``; None if it is locked or gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # this file system has no locks
        pass
    if os.fstat(fd).st_nlink == 0:  # another save has removed it as a leftover
        os.close(fd)
        return None
    return fd


# The swap


def _swap(new: Path, target: Path) -> None:
    """Exchange ``new`` and ``target``; if there is no target, rename ``new`` to it."""
    try:
        _exchange(new, target)
    except FileNotFoundError:
        os.rename(new, target)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        os.rename(target, _replaced(target))
        try:
            os.rename(new, target)
        except BaseException:
            os.rename(_replaced(target), target)
            raise


def _exchange(one: Path, other: Path) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    paths = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(other))


def _replaced(target: Path) -> Path:
    return target.parent / f".{target.name}.replaced"


def _clean(target: Path) -> None:
    """Restore or remove what killed saves have left."""
    if located(target) != target:
        os.rename(_replaced(target), target)
    for entry in list(os.scandir(target.parent)):
        path = Path(entry.path)
        if path == _replaced(target):
            _remove(path)
        elif entry.name.startswith(_prefix(target)) and (lock := _locked(path)) is not None:
            _remove(path)
            os.close(lock)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s is left of a save, and cannot be removed: %s", path, error)
