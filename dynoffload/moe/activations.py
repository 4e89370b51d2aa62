"""Activations between an expert's two matrix products, with their derivatives.

SwiGLU and SiLU have explicit derivatives and recompute what one pass can, instead of saving it. Any
other function uses autograd, one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from dynoffload.errors import ConfigError


class Activation(Protocol):
    """Maps the first product's result to the second product's input, row by row.

    Attributes:
        parts: number of columns of the first product for each column of the result.
    """

    parts: int

    def forward(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out``, (n, h), from ``first``, (n, parts·h)."""

    def again(self, first: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Recompute the result, (n, h); return it with intermediate values for `backward`."""

    def backward(self, first: torch.Tensor, gradient: torch.Tensor, made: Any) -> torch.Tensor:
        """Return the gradient of ``first`` from the result's, (n, h), which may be overwritten."""


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
    """Any row-wise function, differentiated by autograd one tile at a time.

    Args:
        function: maps (n, parts·h) to (n, h), deterministically; it has no trained parameters.
        parts: see `Activation`.

    Raises:
        ConfigError: in forward, if the result has another shape; in backward, if the function
            uses another tensor that is trained.
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
    """Return whether ``result`` depends on a leaf other than ``given`` that requires a gradient."""
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
