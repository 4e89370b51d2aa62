"""Where a part's rows and middle go between forward and backward: a file, by a thread of its own.

The file has no name and is private, as every spill file of dynoffload; its pages may be in the
system's page cache, which is no memory of the process and can be taken from it at any time.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from dynoffload.errors import SpillError
from dynoffload.memory.spill import SpillFile, default_spill_dir, transfer
from dynoffload.planning.extents import Extents
from dynoffload.units import format_bytes

_MOST = 1 << 62


class _Room:
    """Free extents of a file that grows.

    Extents come back when nobody has them any more, which may be in the midst of anything, as the
    garbage collector runs: so they are put aside, and are free from the next `take` on.
    """

    def __init__(self) -> None:
        self._extents = Extents(_MOST)
        self._back: deque[tuple[int, int]] = deque()

    @property
    def end(self) -> int:
        return self._extents.high

    def take(self, size: int) -> int:
        while self._back:
            self._extents.give(*self._back.popleft())
        offset = self._extents.take(size) if size else 0
        if offset is None:
            raise SpillError(f"offloaded parts take more than {format_bytes(_MOST)}")
        return offset

    def give_back(self, offset: int, size: int) -> None:
        if size:
            self._back.append((offset, size))


class Stored:
    """A tensor in the file; its room is free again once nobody has this."""

    def __init__(self, tier: FileTier, offset: int, size: int, writing: Future[None]) -> None:
        self._tier, self._offset, self._size, self._writing = tier, offset, size, writing
        weakref.finalize(self, tier.room.give_back, offset, size)

    def wait(self) -> None:
        """Return once the tensor that was stored may be overwritten."""
        self._tier.result(self._writing, "written to")

    def load(self, into: torch.Tensor) -> Copying:
        """Begin to fill ``into``."""
        return Copying(self._tier, self._tier.read(into, self._offset), self)


class Copying:
    """A read on its way; what is read keeps its room until then."""

    def __init__(self, tier: FileTier, reading: Future[None], held: Stored) -> None:
        self._tier, self._reading, self._held = tier, reading, held

    def wait(self) -> None:
        """Return once it is made."""
        self._tier.result(self._reading, "read from")


class _Copier:
    """A thread that makes copies in the order in which they are asked for.

    It may be asked to end by a finalizer, which the garbage collector runs in the midst of
    anything, so also of asking for a copy: that takes no lock but the queue's, which is made for
    it. (Executors of `concurrent.futures` share one, and the thread would wait for itself.)
    """

    def __init__(self, name: str) -> None:
        self._asked: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        threading.Thread(target=_copy, args=(self._asked,), name=name, daemon=True).start()

    def ask(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._asked.put((future, work))
        return future

    def end(self, last: Callable[[], None]) -> None:
        """End after all that was asked for, and ``last``."""
        self._asked.put((Future(), last))
        self._asked.put(None)


def _copy(asked: SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (given := asked.get()) is not None:
        future, work = given
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del given, future, work  # while it waits it holds nothing


class FileTier:
    """A private file on a disk, and the thread that copies.

    Args:
        directory: where the file lies; by default the system's for temporary files.
        timeout: seconds that a copy may take.

    Raises:
        SpillError: the directory is missing, in memory, not writable or full.
    """

    def __init__(self, directory: Path | None = None, *, timeout: float = 300.0) -> None:
        where = directory or default_spill_dir()
        self._file = SpillFile(where, 0, direct=False, purpose="offloaded parts of batches")
        self._timeout = timeout
        self.room = _Room()
        self._copier = _Copier("dynoffload-parts")
        weakref.finalize(self, self._copier.end, self._file.close)  # after all else

    def store(self, tensor: torch.Tensor) -> Stored:
        """Begin to copy ``tensor``, which is contiguous."""
        size = tensor.numel() * tensor.element_size()
        offset = self.room.take(size)
        try:
            self._file.grow(self.room.end)
        except SpillError:
            self.room.give_back(offset, size)
            raise
        return Stored(self, offset, size, self._copier.ask(partial(self._write, tensor, offset)))

    def read(self, into: torch.Tensor, offset: int) -> Future[None]:
        """Begin to read what lies at ``offset``, after what was asked for before."""
        return self._copier.ask(partial(self._read, into, offset))

    def result(self, copying: Future[None], what: str) -> None:
        """Wait for a copy.

        Raises:
            SpillError: it failed, or takes too long.
        """
        try:
            copying.result(self._timeout)
        except FutureTimeoutError as error:
            raise SpillError(
                f"a part was not {what} the spill file in {self._file.directory} in "
                f"{self._timeout:g} s: check that disk, or pass spill_dir= another"
            ) from error

    def _write(self, tensor: torch.Tensor, offset: int) -> None:
        try:
            transfer(self._file.fd, _bytes(tensor), offset, reads=False)
        except OSError as error:
            message = self._file.unwritable("a part of a batch", str(error.strerror))
            raise SpillError(error.errno, message) from error

    def _read(self, into: torch.Tensor, offset: int) -> None:
        try:
            transfer(self._file.fd, _bytes(into), offset, reads=True)
        except OSError as error:
            message = self._file.unreadable("a part of a batch", str(error.strerror))
            raise SpillError(error.errno, message) from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.detach().view(-1).view(torch.uint8)
