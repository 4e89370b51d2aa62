"""Checksums of a mapped spill file's regions, in debug mode: what comes back is what left.

[Note: touched]  The kernel serves an access to an absent region unasked, and it may be a write. So
a region of which pages are in memory, or were and the kernel has reclaimed them, is not compared.
"""

from __future__ import annotations

import errno
import os
import zlib

from dynoffload.units import MiB

_PIECE = 1 * MiB


class Checksums:
    """CRC-32 of the regions that have left memory, by their offsets in the file ``fd``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._sums: dict[int, int] = {}

    def take(self, offset: int, nbytes: int) -> None:
        """Note the checksum of a region that is about to leave, as it was written."""
        self._sums[offset] = self._of(offset, nbytes)

    def forget(self, offset: int) -> None:
        """Drop the checksum of bytes that count no more."""
        self._sums.pop(offset, None)

    def compare(self, offset: int, nbytes: int) -> None:
        """Compare a region that has come back.

        Raises:
            OSError: it cannot be read; ``EBADMSG`` if its bytes are not those that left.
        """
        known = self._sums.get(offset)
        if known is not None and self._of(offset, nbytes) != known:
            raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))

    def _of(self, offset: int, nbytes: int) -> int:
        found, end = 0, offset + nbytes
        while offset < end:
            piece = os.pread(self._fd, min(_PIECE, end - offset), offset)
            if not piece:
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # the file was cut off
            found = zlib.crc32(piece, found)
            offset += len(piece)
        return found
