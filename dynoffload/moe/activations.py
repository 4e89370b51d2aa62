"""What lies between an expert's two products, and its derivative.

What it is: `Activation`, with SwiGLU and SiLU written out so that nothing is saved that can be made
again in one pass, and any other function by autograd on one tile at a time. What it is not: the
products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional as F


class Activation(Protocol):
    """Maps the result of the first product to what the second takes, row by row.

    Attributes:
        parts: columns of the first for one of the second.
    """

    parts: int

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out``, (n, h), from ``first``, (n, parts·h)."""

    def again(self, first: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the result, (n, h), made again, and what `backward` has of making it."""

    def backward(self, first: torch.Tensor, gradient: torch.Tensor, made: Any) -> torch.Tensor:
        """Return the gradient of ``first`` from that of the result, (n, h), which may be lost."""


class SwiGLU:
    """``silu(a) * b`` of ``[a, b]`` (Shazeer, arXiv 2002.05202)."""

    parts = 2

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """See `Activation.forward`."""
        a, b = first.chunk(2, -1)
        torch.mul(F.silu(a), b, out=out)

    def again(self, first: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Activation.again`."""
        a, b = first.chunk(2, -1)
        silu = F.silu(a)
        return silu * b, silu

    def backward(self, first: torch.Tensor, gradient: torch.Tensor, made: Any) -> torch.Tensor:
        """See `Activation.backward`."""
        a, b = first.chunk(2, -1)
        found = torch.empty_like(first)
        left, right = found.chunk(2, -1)
        torch.mul(gradient, made, out=right)
        torch.ops.aten.silu_backward.grad_input(gradient.mul_(b), a, grad_input=left)
        return found


class SiLU:
    """``silu(a)``."""

    parts = 1

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """See `Activation.forward`."""
        out.copy_(F.silu(first))

    def again(self, first: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Activation.again`."""
        return F.silu(first), None

    def backward(self, first: torch.Tensor, gradient: torch.Tensor, made: Any) -> torch.Tensor:
        """See `Activation.backward`."""
        found: torch.Tensor = torch.ops.aten.silu_backward(gradient, first)
        return found


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

    def again(self, first: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Activation.again`."""
        with torch.enable_grad():
            given = first.detach().requires_grad_()
            result = self._function(given)
        return result.detach(), (result, given)

    def backward(self, first: torch.Tensor, gradient: torch.Tensor, made: Any) -> torch.Tensor:
        """See `Activation.backward`."""
        result, given = made
        found: torch.Tensor
        (found,) = torch.autograd.grad(result, given, gradient.to(result.dtype))
        return found
