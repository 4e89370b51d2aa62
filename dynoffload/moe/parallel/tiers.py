"""Stores rows and middles of a call between forward and backward in a file, by a separate thread.

The file is unnamed and private, like every spill file, and lives as long as the call. Its pages may
be in the system's page cache, which does not count as process memory and can be reclaimed at any
time.
"""

from __future__ import annotations

import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import torch

from dynoffload.errors import SpillError
from dynoffload.memory.spill import SpillFile, default_spill_dir, transfer


class Copy:
    """A copy of a tensor to or from the file, which may be in progress."""

    def __init__(self, tier: FileTier, offset: int, copying: Future[None]) -> None:
        self._tier, self._offset, self._copying = tier, offset, copying

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

    def load(self, into: torch.Tensor) -> Copy:
        """Start to read the tensor into ``into``."""
        return self._tier.copy(into, self._offset, reads=True)


class FileTier:
    """A private file on a disk; a thread copies in the order of requests.

    Args:
        directory: of the file; by default the system's for temporary files.
        timeout: seconds that a copy may take.

    Raises:
        SpillError: the directory is missing, in memory, not writable or full.
    """

    def __init__(self, directory: Path | None = None, *, timeout: float = 300.0) -> None:
        self.directory, self.timeout = directory or default_spill_dir(), timeout
        purpose = "offloaded parts of batches"
        self._file = SpillFile(self.directory, 0, direct=False, purpose=purpose)
        weakref.finalize(self._file, os.close, self._file.fd)  # after the last copy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynoffload-parts")
        self._end = 0

    def store(self, tensor: torch.Tensor) -> Copy:
        """Start to copy ``tensor``, which is contiguous, to the file."""
        offset, self._end = self._end, self._end + tensor.nbytes
        self._file.grow(self._end)
        return self.copy(tensor, offset, reads=False)

    def copy(self, tensor: torch.Tensor, offset: int, *, reads: bool) -> Copy:
        """Start to read or write a contiguous tensor at ``offset``."""
        given = [tensor.detach().view(-1).view(torch.uint8)]
        return Copy(self, offset, self._thread.submit(_copy, self._file, given, offset, reads))


def _copy(file: SpillFile, given: list[torch.Tensor], offset: int, reads: bool) -> None:
    """Copy the tensor in ``given`` and take it out: the executor still holds the list once the
    caller knows that the copy is made, and frees its memory."""
    try:
        transfer(file.fd, given.pop(), offset, reads=reads)
    except OSError as error:
        describe = file.unreadable if reads else file.unwritable
        message = describe("a part of a batch", str(error.strerror))
        raise SpillError(error.errno, message) from error
