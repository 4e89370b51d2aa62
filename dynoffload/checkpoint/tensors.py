"""The memory that tensors of a checkpoint are in, and which of them it can hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from dynoffload.checkpoint.extents import check_spread
from dynoffload.errors import CheckpointError
from dynoffload.memory.local import is_spread, local
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


def check_savable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no bytes of its own.

    Raises:
        CheckpointError: naming it.
    """
    if is_spread(tensor):
        check_spread(name, tensor)
        tensor = local(tensor)
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
