"""Stores a part's rows and middle between forward and backward in a file, by a separate thread.

The file is unnamed and private, like every spill file. Its pages may be in the system's page cache,
which does not count as process memory and can be reclaimed at any time.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import torch

from dynoffload.errors import SpillError
from dynoffload.memory.spill import SpillFile, default_spill_dir, transfer
from dynoffload.planning.extents import Extents

_MAX_FILE_BYTES = 1 << 62  # maximum bytes of a file


class Copy:
    """A copy in progress; a tensor being read keeps its space in the file until then."""

    def __init__(self, tier: FileTier, copying: Future[None], held: object = None) -> None:
        self._tier, self._copying, self._held = tier, copying, held

    def wait(self) -> None:
        """Block until it is complete, and the memory of a written tensor may be overwritten.

        Raises:
            SpillError: it failed, or takes too long.
        """
        try:
            self._copying.result(self._tier.timeout)
        except FutureTimeoutError as error:
            raise SpillError(
                f"a part was not copied to or from the spill file in {self._tier.directory} in "
                f"{self._tier.timeout:g} s: check that disk, or pass spill_dir= another"
            ) from error


class Stored(Copy):
    """A tensor in the file; its space is freed when the last reference to this is gone."""

    def __init__(self, tier: FileTier, copying: Future[None], offset: int, size: int) -> None:
        super().__init__(tier, copying)
        self._offset = offset
        # May be called at any point, when the garbage collector runs.
        weakref.finalize(self, tier.freed.append, (offset, size))

    def load(self, into: torch.Tensor) -> Copy:
        """Start to read the tensor into ``into``."""
        return Copy(self._tier, self._tier.copy(into, self._offset, reads=True), self)


class FileTier:
    """A private file on a disk, and a thread that copies in the order of requests.

    Both end after the last copy, once there are no references to the tier.

    Args:
        directory: of the file; by default the system's for temporary files.
        timeout: seconds that a copy may take.

    Attributes:
        freed: unused space, available from the next `store` on.

    Raises:
        SpillError: the directory is missing, in memory, not writable or full.
    """

    def __init__(self, directory: Path | None = None, *, timeout: float = 300.0) -> None:
        self.directory, self.timeout = directory or default_spill_dir(), timeout
        purpose = "offloaded parts of batches"
        self._file = SpillFile(self.directory, 0, direct=False, purpose=purpose)
        weakref.finalize(self._file, os.close, self._file.fd)
        self._room = Extents(_MAX_FILE_BYTES)
        self.freed: deque[tuple[int, int]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynoffload-parts")

    def store(self, tensor: torch.Tensor) -> Stored:
        """Start to copy ``tensor``, which is contiguous, to the file."""
        while self.freed:
            self._room.give(*self.freed.popleft())
        size = max(tensor.nbytes, 1)
        offset = self._room.take(size) or 0
        try:
            self._file.grow(self._room.high)
        except SpillError:
            self.freed.append((offset, size))
            raise
        return Stored(self, self.copy(tensor, offset, reads=False), offset, size)

    def copy(self, tensor: torch.Tensor, offset: int, *, reads: bool) -> Future[None]:
        """Begin to read or write a contiguous tensor at ``offset``."""
        given = [tensor.detach().view(-1).view(torch.uint8)]
        return self._thread.submit(_copy, self._file, given, offset, reads)


def _copy(file: SpillFile, given: list[torch.Tensor], offset: int, reads: bool) -> None:
    """Copy the tensor in ``given`` and take it out: the executor still holds the list once the
    caller knows that the copy is made, and frees its memory."""
    try:
        transfer(file.fd, given.pop(), offset, reads=reads)
    except OSError as error:
        describe = file.unreadable if reads else file.unwritable
        message = describe("a part of a batch", str(error.strerror))
        raise SpillError(error.errno, message) from error
