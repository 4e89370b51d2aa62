"""A directory that takes another's place at once, and whole.

What is saved goes to a new directory beside the target, which is then exchanged with it by one
system call (``renameat2`` with ``RENAME_EXCHANGE``). So whenever a save is killed, the target is
the old checkpoint or the new one. Where the file system cannot exchange, the target is renamed
twice; a save that is killed between the two leaves the old checkpoint under a second name, where
`located` finds it and the next save puts it back.

The new directory is locked while it is written. One that nobody locks was left by a save that was
killed, and the next save removes it. (Where directories cannot be locked, as on some network file
systems, two processes must not save to one target at the same time.)
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
    """Return the directory that is meant, links followed."""
    return Path(directory).expanduser().resolve()


def located(target: Path) -> Path:
    """Return where the checkpoint of ``target`` is: there, or where a save that was killed on a
    file system without exchange has left it."""
    replaced = _replaced(target)
    return replaced if not target.exists() and replaced.is_dir() else target


@contextlib.contextmanager
def replacing(target: Path, need: int) -> Iterator[Path]:
    """Yield a new directory that takes the place of ``target`` when the block ends without error.

    Single files that others have put beside the old checkpoint (``config.json``, a tokenizer) are
    there too.

    Args:
        target: as of `target_of`; it need not exist, its parent must.
        need: bytes that will be written.

    Raises:
        CheckpointError: the target cannot be replaced, or something went wrong on the disk. The
            old checkpoint is what it was.
    """
    new: Path | None = None
    old: Path | None = None
    lock = -1
    try:
        try:
            _check(target)
            _heal(target)
            _remove_leftovers(target)
            _check_room(target, need)
            new, lock = _make(target)
            yield new
            sync(new)
            _swap(new, target)
            old, new = new, None  # what was there before stays until the disk knows of the swap
            sync(target.parent)
            new = old
        except OSError as error:
            if isinstance(error, DynOffloadError):
                raise
            raise CheckpointError(
                error.errno or errno.EIO,
                f"cannot save checkpoint {target} ({error.strerror or error}; {_free(target)} "
                f"free): {_remedy(error)}; what was saved there before is as it was"
                if old is None
                else f"checkpoint {target} is saved, but the disk may forget it if power fails now "
                f"({error.strerror or error}): check that disk, and save again",
            ) from error
    finally:
        if new is not None:
            _remove(new)  # the old checkpoint after the swap; before it the new one, which failed
            if target.exists():
                _remove(_replaced(target))
        if lock >= 0:
            os.close(lock)


def sync(path: Path) -> None:
    """Wait until the disk has what the directory at ``path`` lists."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check(target: Path) -> None:
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
    why = ""
    if any(entry.is_dir(follow_symlinks=False) for entry in os.scandir(target)):
        why = "it has directories in it"
    elif _is_here(target):
        why = "it is the working directory"
    elif not _is_ours(target):
        names = sorted(entry.name for entry in os.scandir(target) if OURS.fullmatch(entry.name))
        why = f"it has {names[0]}, which is of no checkpoint of dynoffload" if names else ""
    if why:
        raise CheckpointError(
            errno.EEXIST,
            f"cannot save checkpoint {target}: {why}, and the whole directory would be replaced; "
            "name a directory that is the checkpoint's own",
        )


def _is_here(target: Path) -> bool:
    with contextlib.suppress(OSError):
        return target.samefile(os.curdir)
    return False


def _is_ours(target: Path) -> bool:
    with contextlib.suppress(OSError):
        with open(target / manifest.NAME, "rb") as file:
            return manifest.is_manifest(file.read(64))
    return False


def _check_room(target: Path, need: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < need:
        raise CheckpointError(
            errno.ENOSPC,
            f"checkpoint {target} needs {format_bytes(need)}, as the one before stays until it is "
            f"complete, but {target.parent} has {format_bytes(free)} free: free space there, or "
            "save to another disk",
        )


def _free(target: Path) -> str:
    try:
        return format_bytes(shutil.disk_usage(target.parent).free)
    except OSError:
        return "nothing known"


def _remedy(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the directory above it writable, or save elsewhere"
    if error.errno == errno.EBUSY:
        return "it is a mount point, which nothing can replace: name a directory inside it"
    return "free space there, raise the limit, or save to another disk"


# The new directory


def _make(target: Path) -> tuple[Path, int]:
    """Return a new directory, of the target's mode and with its foreign files, and its lock."""
    while True:
        new = target.parent / f"{_prefix(target)}{secrets.token_hex(4)}"
        os.mkdir(new)
        lock = _locked(new)
        if lock is not None:
            break
    try:
        if target.exists():
            os.chmod(new, stat.S_IMODE(target.stat().st_mode))
            for entry in os.scandir(target):
                if not OURS.fullmatch(entry.name):
                    _carry(entry.path, new / entry.name)
    except BaseException:
        os.close(lock)
        _remove(new)
        raise
    return new, lock


def _carry(old: str, new: Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # no links here
        shutil.copy2(old, new, follow_symlinks=False)


def _locked(path: Path) -> int | None:
    """Return a descriptor that locks the directory at ``path``, or None if it is another's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            os.close(fd)
            raise
    if os.fstat(fd).st_nlink == 0:  # whoever takes it for a leftover was faster
        os.close(fd)
        return None
    return fd


# The swap


def _swap(new: Path, target: Path) -> None:
    """Let ``new`` and ``target`` trade places; without a target, take its name."""
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


# What is left


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-"


def _replaced(target: Path) -> Path:
    return target.parent / f".{target.name}.replaced"


def _heal(target: Path) -> None:
    if located(target) != target:
        os.rename(_replaced(target), target)


def _remove_leftovers(target: Path) -> None:
    for entry in list(os.scandir(target.parent)):
        path = Path(entry.path)
        if path == _replaced(target):
            _remove(path)
        elif entry.name.startswith(_prefix(target)):
            lock = _locked(path)
            if lock is not None:
                _remove(path)
                os.close(lock)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s is left of a save, and cannot be removed: %s", path, error)
