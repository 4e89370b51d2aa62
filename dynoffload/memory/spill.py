"""The file tier: one private, unnamed spill file, preallocated on the disk.

No other process can open it, and nothing remains of it however the process ends. What training
needs at least is allocated when the file is created, so a disk that fills up later cannot stop it.
Where a file system cannot preallocate, only its free space is checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dynoffload.errors import CorruptionError, SpillError
from dynoffload.memory.filesystems import MEMORY_FILESYSTEMS as _MEMORY_FILESYSTEMS
from dynoffload.memory.filesystems import filesystem_of, take_room
from dynoffload.units import MiB, format_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_GROWTH = 64 * MiB


def default_spill_dir() -> Path:
    """Return the directory for temporary files, or ``/var/tmp`` where that one is in memory."""
    directory = Path(tempfile.gettempdir())
    if filesystem_of(directory) in _MEMORY_FILESYSTEMS:
        return Path("/var/tmp")
    return directory


UNREAD = "if it cannot be read then either, go on from the last checkpoint"
UNWRITTEN = "what was not written is still in memory: go on once there is room"


def reason(number: int) -> str:
    """Return the error text for an errno of a transfer."""
    if number == errno.EBADMSG:
        return "its bytes are not those that were written"
    return os.strerror(number)


def transfer(descriptor: int, content: torch.Tensor, offset: int, *, reads: bool) -> None:
    """Read or write all of ``content``, uint8, at ``offset`` of a file.

    Raises:
        OSError: the transfer fails; EIO if the file ends too early.
    """
    view = memoryview(content.numpy().data)
    done = 0
    move = os.preadv if reads else os.pwritev
    while done < len(view):
        moved = move(descriptor, [view[done:]], offset + done)
        if moved <= 0:
            raise OSError(errno.EIO, "the file ends before what it holds")
        done += moved


def check_room(directory: Path, needs: Mapping[str, int]) -> None:
    """Check that a directory can hold the spill file.

    Args:
        directory: the directory.
        needs: bytes needed there, by purpose.

    Raises:
        SpillError: missing, in memory, or too full; names need, have and remedy.
    """
    if not directory.is_dir():
        raise SpillError(
            f"spill directory {directory} "
            f"{'is a file:' if directory.exists() else 'does not exist: create it, or'} pass "
            "spill_dir= a directory on a disk"
        )
    kind = filesystem_of(directory)
    if kind in _MEMORY_FILESYSTEMS:
        raise SpillError(
            f"spill directory {directory} is on {kind}, which is memory itself: pass "
            "spill_dir= a directory on a disk"
        )
    free = shutil.disk_usage(directory).free
    if free < sum(needs.values()):
        needed = " and ".join(f"{what} needs {format_bytes(n)}" for what, n in needs.items())
        raise SpillError(
            errno.ENOSPC,
            f"spill directory {directory} has {format_bytes(free)} free but {needed}: free space "
            "there, or pass spill_dir= another disk",
        )


def grown(size: int) -> int:
    """Return the size of a file that has grown to hold ``size`` bytes."""
    return -(-size // _GROWTH) * _GROWTH


class SpillFile:
    """An unnamed file of mode 0600 in ``directory``.

    Args:
        directory: an existing directory on a disk.
        need: minimum bytes, allocated at once.
        direct: bypass the page cache where the file system can; False for a file that is mapped,
            whose mapping uses the page cache.
        purpose: what needs the bytes, for errors.

    Raises:
        SpillError: missing, not writable, in memory, or too full; names need, have and remedy.
    """

    def __init__(
        self, directory: Path, need: int, *, direct: bool = True, purpose: str = "training"
    ) -> None:
        self.directory, self.need = directory, need
        self.size = 0
        check_room(directory, {purpose: need})
        try:
            self.fd = _unnamed(directory, direct)
        except OSError as error:
            raise SpillError(
                f"cannot create a file in spill directory {directory}: {error.strerror}; make it "
                "writable, or pass spill_dir= another directory"
            ) from error
        try:
            self.direct = direct and bool(fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_DIRECT)
            if direct and not self.direct:
                logger.warning(
                    "spill directory %s (%s) has no direct I/O: pages are cached twice, and "
                    "transfers are slower",
                    directory,
                    filesystem_of(directory),
                )
            self._allocate(need)
        except BaseException:
            os.close(self.fd)
            raise

    def grow(self, size: int) -> None:
        """Make sure that ``size`` bytes are allocated on the disk.

        Raises:
            SpillError: the disk is full; the file keeps its size.
        """
        if size > self.size:
            self._allocate(grown(size))

    def _allocate(self, target: int) -> None:
        if target <= self.size:
            return
        try:
            take_room(self.fd, self.size, target)
        except OSError as error:
            raise SpillError(
                error.errno,
                f"the spill file in {self.directory} cannot grow to {format_bytes(target)} "
                f"({error.strerror}; {self._free()} free): free space there, or pass "
                "spill_dir= another disk",
            ) from error
        self.size = target

    def unreadable(self, what: str, why: str) -> str:
        """Return the message for bytes that cannot be read back; ``what`` names them and their
        size, ``why`` is the system's error text."""
        return (
            f"cannot read {what} back from the spill file in {self.directory} ({why}; it has "
            f"{format_bytes(self.size)}): check that disk, or pass spill_dir= another"
        )

    def unwritable(self, what: str, why: str) -> str:
        """Return the message for bytes that cannot be written; they stay in memory."""
        return (
            f"cannot write {what} to the spill file in {self.directory} ({why}; "
            f"{self._free()} free): free space there, or pass spill_dir= another disk"
        )

    def failed(
        self, number: int | None, what: str, *, reads: bool, after: str | None = None
    ) -> SpillError:
        """Return the error for bytes that cannot be read or written.

        Args:
            number: errno of the transfer.
            what: names the bytes and their size.
            reads: whether they were to be read back; else they stay in memory.
            after: what follows from it, in place of `UNREAD` or `UNWRITTEN`.
        """
        number = number or errno.EIO
        message = (self.unreadable if reads else self.unwritable)(what, reason(number))
        then = (UNREAD if reads else UNWRITTEN) if after is None else after
        kind = CorruptionError if number == errno.EBADMSG else SpillError
        return kind(number, f"{message}; {then}" if then else message)

    def _free(self) -> str:
        try:
            return format_bytes(shutil.disk_usage(self.directory).free)
        except OSError:
            return "nothing known"

    def close(self) -> None:
        """Close the file, which frees its disk space."""
        os.close(self.fd)


class NoFile:
    """Placeholder for the spill file of a device that has none."""

    need = size = 0

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def grow(self, size: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _unnamed(directory: Path, direct: bool) -> int:
    """Return the descriptor of a new unnamed file; ``direct`` bypasses the page cache, if the file
    system can."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        descriptor = os.dup(file.fileno())
    if direct:
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    return descriptor
