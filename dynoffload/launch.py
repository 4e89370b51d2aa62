"""Reads the ranks that a launcher such as torchrun sets in ``RANK`` and ``WORLD_SIZE``, and names
files and folders for each rank. It works before a process group exists."""

from __future__ import annotations

import os
from pathlib import Path


def launched_rank() -> int | None:
    """Return this process's rank among several; None if it runs alone."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return rank if size > 1 and 0 <= rank < size else None


def own_file(path: Path) -> Path:
    """Return ``path``, with the rank added if there are several: ``run-rank1.html``."""
    rank = launched_rank()
    return path if rank is None else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")


def own_folder(path: Path) -> Path:
    """Return ``path``; for ranks above 0 a folder in it: ``rank1``."""
    rank = launched_rank()
    return path / f"rank{rank}" if rank else path


def said_by() -> str:
    """Return the prefix of a line that several ranks write: ``"rank 1: "``, or ""."""
    rank = launched_rank()
    return "" if rank is None else f"rank {rank}: "


def local_ranks() -> int:
    """Return how many processes the launcher started on this machine; 1 if unknown."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    except ValueError:
        return 1
