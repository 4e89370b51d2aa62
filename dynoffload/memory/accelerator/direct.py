"""From the file into memory of the accelerator, past host memory.

What it is: reads that a thread begins once the accelerator's memory is free for them, and whose end
the host waits for, as no queue of the accelerator knows of them. What it is not: how an accelerator
reads a file (`Reader`); on CUDA that is GPUDirect Storage, through KvikIO.

Only reads go this way. What leaves the accelerator goes through host memory, which takes it at
once, and from where it may come back.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from dynoffload.errors import BackendError
from dynoffload.memory.accelerator.queues import Moment

logger = logging.getLogger(__name__)


class Reader(Protocol):
    """A file that is read into memory of an accelerator."""

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fill ``target``, uint8, with the file's bytes from ``offset`` on.

        Raises:
            OSError: it cannot be read.
        """

    def close(self) -> None:
        """The file is read no more."""


class Read:
    """A read that is under way; a `Copied` for those who time it, and a `Moment` for the host.

    Attributes:
        error: the errno with which it failed; 0 if it did not, or has not ended.
    """

    def __init__(self) -> None:
        self.error = 0
        self._done = threading.Event()
        self._times: tuple[float, float] | None = None

    def reached(self) -> bool:
        """See `Moment.reached`."""
        return self._done.is_set()

    def wait(self) -> None:
        """See `Moment.wait`."""
        self._done.wait()

    def span(self) -> tuple[float, float] | None:
        """See `Copied.span`."""
        return self._times if self._done.is_set() else None

    def run(self, reader: Reader, target: torch.Tensor, offset: int, after: Moment) -> None:
        """Read, in the calling thread."""
        try:
            after.wait()
            start = time.perf_counter()
            with torch._C._DisableTorchDispatch():  # threads of a block are heard of
                reader.read(target, offset)
            self._times = start, time.perf_counter()
        except OSError as error:
            self.error = error.errno or 5
        except BaseException:
            self.error = 5
            raise
        finally:
            if self._times is None:
                self._times = (now := time.perf_counter()), now
            self._done.set()


class Waited:
    """A `Lag` that the host has stood still for."""

    def __init__(self, waited_s: float) -> None:
        self._waited_s = waited_s

    def seconds(self) -> float:
        """See `Lag.seconds`."""
        return self._waited_s


class Reads:
    """Reads of one file.

    Args:
        reader: the file.
        threads: that read at the same time.
    """

    def __init__(self, reader: Reader, threads: int) -> None:
        self._reader = reader
        self._workers = ThreadPoolExecutor(threads, "dynoffload-direct")

    def begin(self, target: torch.Tensor, offset: int, after: Moment) -> Read:
        """Fill ``target`` from ``offset`` of the file on, once ``after`` is reached."""
        read = Read()
        self._workers.submit(read.run, self._reader, target, offset, after)
        return read

    def close(self) -> None:
        """End the threads; no read is under way."""
        self._workers.shutdown()
        self._reader.close()


def open_reader(device: torch.device, descriptor: int) -> Reader:
    """Return what reads an open file into memory of ``device``.

    Raises:
        BackendError: nothing can here.
    """
    if device.type != "cuda":
        raise BackendError(
            f"gpudirect=True is for CUDA, and parameters are to be on {device}: leave it out"
        )
    return KvikioReader(descriptor)


class KvikioReader:
    """A `Reader` by GPUDirect Storage.

    Args:
        descriptor: of the file, which needs no name.

    Raises:
        BackendError: KvikIO is not installed, or finds no driver.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            import kvikio
            import kvikio.defaults
        except ImportError as error:
            raise BackendError(
                f"gpudirect=True needs KvikIO ({error}): pip install 'dynoffload[gpudirect]', or "
                "leave the option out"
            ) from error
        if kvikio.defaults.is_compat_mode_preferred():
            logger.warning(
                "GPUDirect Storage is not at hand (no nvidia-fs driver, or no file system that it "
                "serves): KvikIO reads through host memory of its own, which no budget counts"
            )
        try:
            self._file: Any = kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r")
        except (OSError, RuntimeError) as error:
            raise BackendError(
                f"KvikIO cannot open the spill file ({error}): leave gpudirect=True out"
            ) from error

    def read(self, target: torch.Tensor, offset: int) -> None:
        """See `Reader.read`; the interpreter's lock is let go of while it is read."""
        try:
            done = self._file.pread(target, target.nbytes, offset).get()
        except RuntimeError as error:  # of the library below it
            raise OSError(5, str(error)) from error
        if done != target.nbytes:
            raise OSError(5, "the file ends before what it holds")

    def close(self) -> None:
        """See `Reader.close`."""
        self._file.close()
