"""Copies of tensors in a file of their own, to which they can be set back.

Bytes pass through one small buffer, so that no tensor is in memory twice.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dynoffload.errors import SpillError
from dynoffload.memory.pieces import Buffer, Holder, same_bits
from dynoffload.memory.spill import SpillFile, reason, transfer


class Copies:
    """A file of copies, one behind the other.

    Args:
        memory: keeps the bytes under a piece of a tensor at hand.
        directory: where the file lies.
        need: bytes it will take at least.
        what: one of the copies, with an article, for messages.
        purpose: of the file, for messages.
        unwritten: what it means that one cannot be written, for messages.

    Raises:
        SpillError: the directory cannot be used.
    """

    def __init__(
        self,
        memory: Holder,
        directory: Path,
        need: int,
        *,
        what: str,
        purpose: str,
        unwritten: str,
    ) -> None:
        self._memory, self._what, self._unwritten = memory, what, unwritten
        self._file = SpillFile(directory, need, direct=False, purpose=purpose)
        self._buffer = Buffer()
        self._end = 0

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def forget(self) -> None:
        """No copy is of use any more."""
        self._end = 0

    def write(self, tensor: torch.Tensor) -> int:
        """Copy ``tensor``; return where the copy begins.

        Raises:
            SpillError: it cannot be written; what was copied before stays.
        """
        start, end = self._end, self._end + tensor.nbytes
        self._file.grow(end)
        at = start
        for piece in self._memory.pieces(tensor.detach()):
            content = self._buffer.like(piece)
            with self._memory.held(piece), torch.no_grad():
                content.copy_(piece)
            try:
                transfer(self._file.fd, _raw(content), at, reads=False)
            except OSError as error:
                message = self._file.unwritable(self._what, reason(error.errno or 0))
                raise SpillError(error.errno, f"{message}; {self._unwritten}") from error
            at += piece.nbytes
        self._end = end
        return start

    def read(self, start: int, tensor: torch.Tensor) -> None:
        """Give ``tensor`` the bytes of the copy that begins at ``start``; it is written to where
        they differ only.

        Raises:
            SpillError: the copy, or what lies beside it, cannot be read.
        """
        at = start
        for piece in self._memory.pieces(tensor.detach()):
            before = self._buffer.like(piece)
            try:
                transfer(self._file.fd, _raw(before), at, reads=True)
            except OSError as error:
                message = self._file.unreadable(self._what, reason(error.errno or 0))
                raise SpillError(error.errno, message) from error
            at += piece.nbytes
            with self._memory.held(piece), torch.no_grad():
                if not same_bits(piece, before):
                    piece.copy_(before)


def _raw(content: torch.Tensor) -> torch.Tensor:
    return content.reshape(-1).view(torch.uint8)
