"""The memory that tensors of a checkpoint are in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from dynoffload.memory.pieces import Holder, pieces


class Memory(Holder, Protocol):
    """Where the tensors of a model and its optimizer live."""

    def adopt(self, parameter: nn.Parameter) -> None:
        """The parameter has got optimizer state: take it in, before it has content."""


class Ordinary:
    """Memory of no budget."""

    def pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """See `Holder.pieces`."""
        return pieces(tensor)

    def held(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """See `Holder.held`."""
        return contextlib.nullcontext()

    def adopt(self, parameter: nn.Parameter) -> None:
        """See `Memory.adopt`."""
