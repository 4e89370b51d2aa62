"""What lies between an expert's two products, and its derivative.

SwiGLU and SiLU are written out, so that nothing is saved that one pass makes again. Any other
function goes through autograd, one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from dynoffload.errors import ConfigError


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
        function: of (n, parts·h), returns (n, h), the same each time; it has no parameters that
            are trained.
        parts: see `Activation`.

    Raises:
        ConfigError: in forward, of a result of another shape; in backward, of something else that
            is trained.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], parts: int) -> None:
        self._function, self.parts = function, parts

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """See `Activation.forward`."""
        with torch.no_grad():
            made = self._function(first)
        if made.shape != out.shape:
            raise ConfigError(
                f"{self._name()} makes {tuple(made.shape)} of {tuple(first.shape)}, and experts' "
                f"second product takes {tuple(out.shape)}"
            )
        out.copy_(made)

    def again(self, first: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Activation.again`."""
        with torch.enable_grad():
            given = first.detach().requires_grad_()
            result = self._function(given)
        if trains(result, given):
            raise ConfigError(
                f"{self._name()} computes with a tensor that is trained, whose gradient would be "
                "lost: make it one that requires none, or compute these experts by another "
                "implementation"
            )
        return result.detach(), (result, given)

    def backward(self, first: torch.Tensor, gradient: torch.Tensor, made: Any) -> torch.Tensor:
        """See `Activation.backward`."""
        result, given = made
        found: torch.Tensor
        (found,) = torch.autograd.grad(result, given, gradient.to(result.dtype))
        return found

    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__name__))


def trains(result: torch.Tensor, given: torch.Tensor) -> bool:
    """Return whether ``result`` has a gradient of any leaf but ``given``."""
    ahead, seen = [result.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not given:
            return True
        ahead += [one for one, _ in node.next_functions]
    return False
