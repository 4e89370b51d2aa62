"""Files that are not ours, from which regions are read until they are written."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dynoffload.errors import SpillError
from dynoffload.memory.spill import reason


class SourceFile:
    """A file that is open for reading as long as this object lives.

    Attributes:
        path: of the file.
        fd: its descriptor.
        direct: another that bypasses the page cache; -1 where the file system has none.
        size: its bytes when it was opened.
        modified_ns: when it had been modified last by then.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False  # others may read it then
        try:
            same = f"/proc/self/fd/{self.fd}"  # another file may have the path by now
            self.direct = os.open(same, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            weakref.finalize(self, os.close, self.direct).atexit = False
        except OSError:
            self.direct = -1
        found = os.fstat(self.fd)
        self.size, self.modified_ns = found.st_size, found.st_mtime_ns

    def has_changed(self) -> bool:
        """Return whether the file was written, or its time of modification set, since then."""
        found = os.fstat(self.fd)
        return (found.st_size, found.st_mtime_ns) != (self.size, self.modified_ns)


class Extent(NamedTuple):
    """A range of bytes of a file."""

    file: SourceFile
    offset: int
    nbytes: int


def unread(files: Sequence[SourceFile], number: int, region: str) -> SpillError:
    """Return the error for a ``region`` of ``files`` whose read has failed by ``number``."""
    paths = ", ".join(str(one.path) for one in files if one.has_changed())
    paths = paths or ", ".join(str(one.path) for one in files)
    why = "it has changed since" if number == errno.ESTALE else reason(number)
    return SpillError(
        number,
        f"cannot read {region} from {paths}, where the block found it ({why}): leave the files of "
        "a model alone while a block reads them, and begin again; inside the block, what trains "
        "can still be saved",
    )
