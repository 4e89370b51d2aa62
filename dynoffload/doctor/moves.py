"""How long the kernel takes to move pages between the pager's slots and a region's address.

What it is: `measure_moves`, on a pager of its own. What it is not: a transfer; no byte is copied.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dynoffload.errors import BackendError
from dynoffload.units import KiB, MiB

_SMALL, _LARGE, _HUGE = 4 * KiB, 64 * KiB, 2 * MiB
_REGION = 1 * MiB
_REGIONS, _ROUNDS = 4, 20


@dataclass(frozen=True)
class Moves:
    """Seconds of moving a page of a pool.

    Attributes:
        call_s: of the call, ...
        page_s: ... and for each 4 KiB.
        huge_s: of a huge page, call and all.
    """

    call_s: float
    page_s: float
    huge_s: float


def measure_moves(directory: str | Path) -> Moves:
    """Measure moves to and fro; takes a fraction of a second, and 16 MiB of memory.

    Args:
        directory: on a disk, for the pager's file, of which nothing remains.

    Raises:
        BackendError: the system refuses the pager.
        SpillError: the directory cannot be used.
    """
    from dynoffload.memory.pager import probe  # imports torch

    reason = probe()
    if reason:
        raise BackendError(reason)
    small, large, huge = (
        _seconds(Path(directory), page, size)
        for page, size in ((_SMALL, _REGION), (_LARGE, _REGION), (_HUGE, _HUGE))
    )
    pages = _LARGE // _SMALL
    page_s = max(0.0, (large - small) / (pages - 1))
    return Moves(max(0.0, small - page_s), page_s, huge)


def _seconds(directory: Path, page: int, nbytes: int) -> float:
    """Return the seconds of moving one page, the median of many."""
    from dynoffload.memory.pager import Pager

    pager = Pager(
        2 * _REGIONS * nbytes, page, directory, need=_REGIONS * nbytes, threads=1, record=False
    )
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
