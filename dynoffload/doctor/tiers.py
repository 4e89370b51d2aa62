"""Measures the tiers: bandwidth of the spill directory, bypassing the page cache, and of memory.

Reads and writes use O_DIRECT in 8 MiB chunks, as the file tier does, with buffers in huge pages.
They run with one and two threads, then in both directions at once. The file is a spill file as in
training, fully written before it is timed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from dynoffload.doctor.system import filesystem_of
from dynoffload.errors import ConfigError, SpillError
from dynoffload.memory.spill import SpillFile, check_room
from dynoffload.units import GiB, MiB, format_bytes

CHUNK = 8 * MiB
FILE_BYTES = GiB
"""Size of the file that is read and written: far larger than a disk's own cache."""
_BUFFERS = 4  # chunks per thread, used in turn
_COPY_BYTES = 256 * MiB  # split among the threads: larger than the CPU caches, small in memory
_MOST_THREADS = 16


class Direction(str, Enum):
    """Kind of measurement."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    """Half of the threads read while the others write; counts the bytes of both."""
    MEMORY = "memory"
    """Copies within memory; each byte is counted once, though read and written."""


@dataclass(frozen=True)
class Measurement:
    """Bytes per second that ``threads`` threads moved together in chunks of ``chunk`` bytes."""

    direction: Direction
    threads: int
    chunk: int
    bps: float


@dataclass(frozen=True)
class Tiers:
    """Measured bandwidth of both tiers.

    Attributes:
        spill_dir: the directory that was measured.
        direct: whether O_DIRECT was used; otherwise files were buffered and synced.
        read_bps: bytes per second read, best of one and two threads.
        write_bps: bytes per second written, best of one and two threads.
        mixed_bps: bytes per second of both directions together, running at once.
        memory_bps: bytes per second copied within memory, best of one thread and one per core.
        rows: all measurements.
    """

    spill_dir: str
    direct: bool
    read_bps: float
    write_bps: float
    mixed_bps: float
    memory_bps: float
    rows: tuple[Measurement, ...]


Progress = Callable[[str, float], None]
"""Called before each measurement with its name and the share of work done so far, 0 to 1."""


def measure_tiers(
    spill_dir: str | Path,
    seconds: float = 1.0,
    *,
    file_bytes: int | None = None,
    progress: Progress | None = None,
) -> Tiers:
    """Measure the file tier in ``spill_dir`` and the memory.

    Args:
        spill_dir: an existing directory on a disk; its temporary file is always removed.
        seconds: minimum duration of each of the seven measurements. The whole call takes about
            eight times as long.
        file_bytes: size of the file; `FILE_BYTES` by default, less where space is short.
        progress: called before each measurement.

    Raises:
        SpillError: if the directory is missing, not writable, in memory, full, or fails.
        ConfigError: if ``seconds`` is not positive.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds={seconds} must be positive")
    directory = Path(spill_dir)
    size = _usable_size(directory, file_bytes)
    report = progress or (lambda name, share: None)
    rows: list[Measurement] = []
    with _spill_file(directory, size) as file:
        descriptor, direct = file.fd, file.direct
        plan = [
            (Direction.WRITE, 1),
            (Direction.WRITE, 2),
            (Direction.READ, 1),
            (Direction.READ, 2),
            (Direction.MIXED, 4),
        ]
        _fill(descriptor, size)
        for done, (direction, threads) in enumerate(plan):
            report(f"{direction.value}, {threads} thread" + ("s" if threads > 1 else ""), done / 7)
            bps = _file_bandwidth(descriptor, size, direction, threads, seconds, direct)
            rows.append(Measurement(direction, threads, CHUNK, bps))
    cores = len(os.sched_getaffinity(0))
    for done, threads in enumerate(sorted({1, min(cores, _MOST_THREADS)}), len(plan)):
        report(f"memory, {threads} thread" + ("s" if threads > 1 else ""), done / 7)
        bps = _memory_bandwidth(threads, seconds)
        rows.append(Measurement(Direction.MEMORY, threads, _COPY_BYTES // threads, bps))
    best = {
        direction: max(row.bps for row in rows if row.direction is direction)
        for direction in Direction
    }
    return Tiers(
        spill_dir=str(directory),
        direct=direct,
        read_bps=best[Direction.READ],
        write_bps=best[Direction.WRITE],
        mixed_bps=best[Direction.MIXED],
        memory_bps=best[Direction.MEMORY],
        rows=tuple(rows),
    )


def _usable_size(directory: Path, wanted: int | None) -> int:
    free = filesystem_of(directory).free_bytes
    size = min(FILE_BYTES if wanted is None else wanted, free // 2) // CHUNK * CHUNK
    size = max(size, 8 * CHUNK)
    check_room(directory, {"measuring": 2 * size})
    return size


@contextlib.contextmanager
def _spill_file(directory: Path, size: int) -> Iterator[SpillFile]:
    """Yield a spill file as in training; disk errors become `SpillError`."""
    try:
        with contextlib.closing(SpillFile(directory, size, purpose="measuring")) as file:
            yield file
    except SpillError:
        raise
    except OSError as error:
        raise SpillError(
            f"{directory}: {error.strerror or error} while measuring a file of "
            f"{format_bytes(size)}: free some space, or pass spill_dir= another disk"
        ) from error


def _buffer(size: int, seed: int) -> memoryview:
    """Return ``size`` random bytes, in huge pages if available. Random, so that a device that
    compresses does not look faster."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages returns EINVAL
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = np.random.default_rng(seed).bytes(size)
    return memoryview(memory)


def _fill(descriptor: int, size: int) -> None:
    """Write the whole file: allocated but unwritten blocks read as zeros without disk access."""
    piece = _buffer(CHUNK, 0)
    for offset in range(0, size, CHUNK):
        _require_chunk(os.pwrite(descriptor, piece, offset))
    os.fsync(descriptor)


def _file_bandwidth(
    descriptor: int, size: int, direction: Direction, threads: int, seconds: float, direct: bool
) -> float:
    share = size // CHUNK // threads

    def prepare(index: int) -> tuple[Move, Callable[[], None]]:
        writes = direction is Direction.WRITE or (direction is Direction.MIXED and index % 2 == 1)
        view = _buffer(_BUFFERS * CHUNK, index)
        pieces = [view[at * CHUNK : (at + 1) * CHUNK] for at in range(_BUFFERS)]

        def move(turn: int) -> int:
            offset = (index * share + turn % share) * CHUNK
            piece = pieces[turn % _BUFFERS]
            if writes:
                return _require_chunk(os.pwrite(descriptor, piece, offset))
            if not direct:
                os.posix_fadvise(descriptor, offset, CHUNK, os.POSIX_FADV_DONTNEED)
            return _require_chunk(os.preadv(descriptor, [piece], offset))

        def finish() -> None:
            if writes and not direct:
                os.fsync(descriptor)

        return move, finish

    return _bandwidth(prepare, threads, seconds)


def _memory_bandwidth(threads: int, seconds: float) -> float:
    def prepare(index: int) -> tuple[Move, Callable[[], None]]:
        source = np.full(_COPY_BYTES // threads // 8, index, dtype=np.int64)
        target = np.zeros_like(source)

        def move(turn: int) -> int:
            np.copyto(target, source)
            return source.nbytes

        return move, lambda: None

    return _bandwidth(prepare, threads, seconds)


Move = Callable[[int], int]
"""Called with the turn's number; moves some bytes and returns how many."""


def _bandwidth(
    prepare: Callable[[int], tuple[Move, Callable[[], None]]], threads: int, seconds: float
) -> float:
    """Return the bytes per second that ``threads`` threads move together, over ``seconds``."""
    ready = threading.Barrier(threads)

    def work(index: int) -> float:
        move, finish = prepare(index)
        ready.wait(60)
        begin, moved, turn = time.perf_counter(), 0, 0
        while time.perf_counter() - begin < seconds:
            moved += move(turn)
            turn += 1
        finish()
        return moved / (time.perf_counter() - begin)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def _require_chunk(count: int) -> int:
    if count != CHUNK:
        raise SpillError(
            f"the spill file moved {count} of {CHUNK} bytes; the disk is full or failing"
        )
    return count
