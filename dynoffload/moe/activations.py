"""What lies between an expert's two products, and its derivative.

What it is: `Activation`, with SwiGLU and SiLU written out so that nothing is saved that can be made
again in one pass, and any other function by autograd on one tile at a time. What it is not: the
products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional as F

_silu_backward = torch.ops.aten.silu_backward


class Activation(Protocol):
    """Maps the result of the first product to what the second takes, row by row.

    Attributes:
        parts: columns of the first for one of the second.
    """

    parts: int

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out``, (n, h), from ``first``, (n, parts·h)."""

    def backward(self, first: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``first`` from that of the result, (n, h)."""


class SwiGLU:
    """``silu(a) * b`` of ``[a, b]`` (Shazeer, arXiv 2002.05202)."""

    parts = 2

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """See `Activation.forward`."""
        a, b = first.chunk(2, -1)
        torch.mul(F.silu(a), b, out=out)

    def backward(self, first: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """See `Activation.backward`; ``silu(a)`` is made again."""
        a, b = first.chunk(2, -1)
        made = torch.empty_like(first)
        left, right = made.chunk(2, -1)
        torch.mul(gradient, F.silu(a), out=right)
        left.copy_(_silu_backward(gradient * b, a))
        return made


class SiLU:
    """``silu(a)``."""

    parts = 1

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """See `Activation.forward`."""
        out.copy_(F.silu(first))

    def backward(self, first: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """See `Activation.backward`."""
        made: torch.Tensor = _silu_backward(gradient, first)
        return made


class Traced:
    """Any function of rows; its derivative is autograd's, of one tile at a time.

    Args:
        function: of (n, parts·h), returns (n, h); it has no parameters that are trained.
        parts: see `Activation`.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], parts: int) -> None:
        self._function, self.parts = function, parts

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """See `Activation.forward`."""
        with torch.no_grad():
            out.copy_(self._function(first))

    def backward(self, first: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """See `Activation.backward`."""
        with torch.enable_grad():
            given = first.detach().requires_grad_()
            made = self._function(given)
        (found,) = torch.autograd.grad(made, given, gradient.to(made.dtype))
        return found
