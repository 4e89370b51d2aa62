"""File-mapped copies of storages that do not fit in memory when paging ends."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from dynoffload.errors import SpillError
from dynoffload.memory.spill import SpillFile
from dynoffload.units import format_bytes


def mapped_copy(source: torch.UntypedStorage, directory: Path) -> torch.UntypedStorage:
    """Return a copy of ``source`` that maps an unlinked file in ``directory``.

    Raises:
        SpillError: the file cannot be created, grown or mapped; states need, have and remedy.
    """
    need = source.nbytes()
    purpose = "what does not fit in memory outside of offload()"
    file = SpillFile(directory, need, direct=False, purpose=purpose)
    try:
        memory = mmap.mmap(file.fd, need)
    except OSError as error:
        raise SpillError(
            error.errno,
            f"{purpose} needs {format_bytes(need)}, and the file in {directory} cannot be mapped "
            f"({error.strerror}): raise the limit of virtual memory (ulimit -v), or save before "
            "the block ends",
        ) from error
    finally:
        file.close()
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    storage.copy_(source)
    memory.flush()
    return storage
