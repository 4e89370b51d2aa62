"""Reads and writes the bytes of a tensor in pieces.

A tensor under a budget must not be copied whole. So it is written and read through one small
buffer, in pieces that are views of it, in the order of its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from dynoffload.units import MiB

PIECE = MiB


def pieces(tensor: torch.Tensor, limit: int = PIECE) -> Iterator[torch.Tensor]:
    """Yield views of ``tensor`` of at most ``limit`` bytes each, in the order of its elements."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return
    if nbytes <= limit:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), limit // tensor.element_size())
    elif rows := limit // (nbytes // len(tensor)):
        yield from torch.split(tensor, rows)
    else:
        for row in tensor:
            yield from pieces(row, limit)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` fill a range of memory without gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two strided tensors of one dtype and shape have the same bits.

    It copies tensors that are not contiguous, or on another device: pass pieces.
    """
    other = other.to(one.device)
    whole = (t.detach().resolve_conj().resolve_neg().contiguous().flatten() for t in (one, other))
    return torch.equal(*(t.view(torch.uint8) for t in whole))


class Holder(Protocol):
    """Keeps tensors present, piece by piece."""

    def pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield pieces as `pieces` does, or smaller ones if fewer bytes can be held at once."""

    def held(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Keep the bytes of one of the `pieces` present while the block runs."""


class Buffer:
    """A buffer of `PIECE` bytes through which tensors are read and written."""

    def __init__(self) -> None:
        self._tensor = torch.empty(PIECE, dtype=torch.uint8)
        self._view = memoryview(self._tensor.numpy())  # type: ignore[arg-type]

    def bytes(self, nbytes: int = PIECE) -> memoryview:
        """Return the first ``nbytes``, at most `PIECE`."""
        return self._view[:nbytes]

    def like(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the first bytes as a tensor of the dtype and shape of ``piece``."""
        nbytes = piece.numel() * piece.element_size()
        return self._tensor[:nbytes].view(piece.dtype).view(piece.shape)
