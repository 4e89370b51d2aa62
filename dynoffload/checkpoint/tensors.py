"""Interface to the memory in which a checkpoint's tensors are stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from dynoffload.memory.pieces import Holder, pieces


class Memory(Holder, Protocol):
    """Where the tensors of a model and its optimizer are stored."""

    def adopt(self, parameter: nn.Parameter) -> None:
        """Adopt the parameter's new optimizer state, before it has content."""


class Ordinary:
    """Plain memory without a budget."""

    def pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """See `Holder.pieces`."""
        return pieces(tensor)

    def held(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """See `Holder.held`."""
        return contextlib.nullcontext()

    def adopt(self, parameter: nn.Parameter) -> None:
        """See `Memory.adopt`."""
