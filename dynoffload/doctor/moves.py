"""Measures how long the kernel takes to move pages between the pager's slots and a region.

`measure_moves` uses its own pager; no byte is copied.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from dynoffload.errors import BackendError
from dynoffload.units import KiB, MiB

_PAGES = tuple(1 << power for power in range((4 * KiB).bit_length() - 1, (2 * MiB).bit_length()))
_REGION = 1 * MiB
_REGIONS, _ROUNDS = 4, 20


def measure_moves(directory: str | Path) -> dict[int, float]:
    """Measure moves in both directions for each page size a pool may use, 4 KiB to 2 MiB. Up to
    1 MiB, system pages are moved one by one, and larger pages cost less than in proportion.
    A page of 2 MiB is moved as one. Takes less than a second, and 16 MiB of memory.

    Args:
        directory: on a disk, for the pager's file, which is removed.

    Returns:
        Page size in bytes -> seconds to move one page.

    Raises:
        BackendError: the system refuses the pager.
        SpillError: the directory cannot be used.
    """
    from dynoffload.memory.pager import probe  # imports torch

    reason = probe()
    if reason:
        raise BackendError(reason)
    return {page: _seconds(Path(directory), page, max(page, _REGION)) for page in _PAGES}


def _seconds(directory: Path, page: int, nbytes: int) -> float:
    """Return the median seconds of moving one page."""
    from dynoffload.memory.pager import Pager

    pager = Pager(2 * _REGIONS * nbytes, page, directory, need=_REGIONS * nbytes, threads=1)
    taken = []
    try:
        regions = [pager.allocate(nbytes) for _ in range(_REGIONS)]
        for region in regions:
            pager.acquire([region])
        for _ in range(_ROUNDS):
            for region in regions:
                begin = time.perf_counter()
                pager.lock([region])
                taken.append(time.perf_counter() - begin)
                pager.unlock([region])
                begin = time.perf_counter()
                pager.touch([region])
                taken.append(time.perf_counter() - begin)
    finally:
        pager.close()
    return median(taken) / (nbytes // page)
