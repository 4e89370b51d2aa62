"""Memory outside of a session: what does not fit in memory when paging ends stays file-mapped."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch

from dynoffload.errors import SpillError
from dynoffload.units import format_bytes


def mapped_copy(source: torch.UntypedStorage, directory: Path) -> torch.UntypedStorage:
    """Return a copy of ``source`` that lives in an unlinked file of ``directory``.

    Raises:
        SpillError: the file cannot be made, grown or mapped; names need, have and remedy.
    """
    need = source.nbytes()
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, need)
            memory = mmap.mmap(file.fileno(), need)
    except OSError as error:
        try:
            free = format_bytes(shutil.disk_usage(directory).free)
        except OSError:
            free = "nothing known"
        raise SpillError(
            error.errno,
            f"{format_bytes(need)} that do not fit in memory outside of offload() cannot be kept "
            f"in {directory} ({error.strerror}; {free} free): free space there, pass spill_dir= "
            "another disk, or save before the block ends",
        ) from error
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    storage.copy_(source)
    memory.flush()
    return storage
