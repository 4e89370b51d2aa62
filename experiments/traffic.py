"""Reads and writes a file at a given rate, past the page cache, beside another process's training.

What this costs plain training is the *interference floor* of offloading: no plan that moves these
bytes through this disk disturbs less than a process that does nothing else.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

from dynoffload.memory.spill import SpillFile

_CHUNK = 2 << 20
_CHUNKS = 128


class _Mover(threading.Thread):
    """Moves chunks one after the other, no faster than ``rate`` bytes a second."""

    def __init__(self, fd: int, rate: float, *, write: bool) -> None:
        super().__init__(daemon=True)
        self._fd, self._rate, self._write = fd, rate, write
        self._buffer = mmap.mmap(-1, _CHUNK)
        self.ends = threading.Event()
        self.moved = 0

    def run(self) -> None:
        start = time.perf_counter()
        for number in range(1 << 60):
            late = start + self.moved / self._rate - time.perf_counter()
            if self.ends.wait(max(0.0, late)):
                return
            at = number % _CHUNKS * _CHUNK
            move = os.pwritev if self._write else os.preadv
            self.moved += move(self._fd, [self._buffer], at)


_FILES: list[SpillFile] = []
_MOVERS: list[_Mover] = []


def begin(directory: str, read_bps: float, write_bps: float) -> None:
    """Begin to move bytes through a file in ``directory``; other threads do."""
    if not _FILES:
        _FILES.append(SpillFile(Path(directory), _CHUNK * _CHUNKS))
        zeros = mmap.mmap(-1, _CHUNK)
        for number in range(_CHUNKS):
            os.pwritev(_FILES[0].fd, [zeros], number * _CHUNK)
    _MOVERS.extend(
        _Mover(_FILES[0].fd, rate, write=write)
        for rate, write in ((read_bps, False), (write_bps, True))
        if rate > 0
    )
    for one in _MOVERS:
        one.start()


def end() -> int:
    """Stop; return the bytes moved since `begin`."""
    for one in _MOVERS:
        one.ends.set()
    for one in _MOVERS:
        one.join()
    moved = sum(one.moved for one in _MOVERS)
    _MOVERS.clear()
    return moved
