"""The bytes of a tensor, piece by piece, and the memory that they are in.

A tensor under a budget must not be copied whole. So it is written and read through one small
buffer, in pieces that are views of it, in the order of its elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from dynoffload.errors import CheckpointError
from dynoffload.units import MiB

PIECE = MiB


class Memory(Protocol):
    """Where the tensors of a model and its optimizer live."""

    def held(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Keep the bytes under a tensor of at most `PIECE` present while the block runs."""

    def adopt(self, parameter: nn.Parameter) -> None:
        """The parameter has got optimizer state: take it in, before it has content."""


class Ordinary:
    """Memory of no budget."""

    def held(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """See `Memory.held`."""
        return contextlib.nullcontext()

    def adopt(self, parameter: nn.Parameter) -> None:
        """See `Memory.adopt`."""


def check_savable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no bytes of its own.

    Raises:
        CheckpointError: naming it.
    """
    what = ""
    if tensor.layout != torch.strided:
        what = f"of layout {tensor.layout}"
    elif hasattr(tensor, "__tensor_flatten__"):
        what = f"a {type(tensor).__name__}, which wraps other tensors"
    elif tensor.is_quantized:
        what = "quantized"
    elif tensor.is_meta:
        what = "on the meta device"
    if what:
        raise CheckpointError(
            f"tensor {name!r} is {what}: a checkpoint holds dense tensors that have content; "
            "convert it first"
        )


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


class Buffer:
    """`PIECE` bytes through which every tensor passes on its way out or in."""

    def __init__(self) -> None:
        self._tensor = torch.empty(PIECE, dtype=torch.uint8)
        self._view = memoryview(self._tensor.numpy())  # type: ignore[arg-type]

    def bytes(self, nbytes: int = PIECE) -> memoryview:
        """Return the first ``nbytes``, or as many as there are."""
        return self._view[:nbytes]

    def like(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the bytes that ``piece`` takes as a tensor of its dtype and shape."""
        nbytes = piece.numel() * piece.element_size()
        return self._tensor[:nbytes].view(piece.dtype).view(piece.shape)
