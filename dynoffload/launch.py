"""What a launcher such as torchrun says of this process by ``RANK`` and ``WORLD_SIZE``, and names
of files and folders that each rank writes for itself. A process group may not be there yet."""

from __future__ import annotations

import os
from pathlib import Path


def launched_rank() -> int | None:
    """Return this process's rank among several; None where it is alone."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return rank if size > 1 and 0 <= rank < size else None


def own_file(path: Path) -> Path:
    """Return ``path``, of several ranks with this one's number: ``run-rank1.html``."""
    rank = launched_rank()
    return path if rank is None else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")


def own_folder(path: Path) -> Path:
    """Return ``path``, of several ranks but the first a folder in it: ``rank1``."""
    rank = launched_rank()
    return path / f"rank{rank}" if rank else path


def said_by() -> str:
    """Return what stands before a line that several ranks write: ``"rank 1: "``, or ""."""
    rank = launched_rank()
    return "" if rank is None else f"rank {rank}: "


def local_ranks() -> int:
    """Return how many processes the launcher has started on this machine; 1 if it says none."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    except ValueError:
        return 1
