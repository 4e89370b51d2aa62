"""Experts on a GPU, by Triton kernels.

`refusal` reports whether the kernels support a call; `fused` runs them. Triton is imported at the
first supported call. If it is missing, experts run one by one, which is logged once.

On an H200 they are slower than products of cuBLAS (docs/moe.md).
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dynoffload.moe.activations import Activation, SiLU, SwiGLU
from dynoffload.moe.indices import Routing

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Return whether Triton is installed; log once if it is not."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning(
            "triton is not installed, so experts on a GPU go one by one; "
            "in a checkout of dynoffload, pip install '.[triton]'"
        )
    return found


def watched() -> bool:
    """Return whether a dispatch mode is active; it would not see the memory that kernels access."""
    return _get_current_dispatch_mode() is not None


def suits(*tensors: torch.Tensor) -> bool:
    """Return whether kernels are used for these tensors by default."""
    plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors)
    return plain and all(one.is_cuda for one in tensors) and not watched() and available()


def refusal(
    tokens: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    biases: bool,
    activation: Activation,
) -> str | None:
    """Return why the kernels do not support this call, or None.

    Args:
        tokens: (L, d).
        up: the first matrices, of the right shape.
        down: the second matrices, of the right shape.
        biases: whether experts have biases.
        activation: between the products.
    """
    if not available():
        return "triton is not installed"
    if not tokens.is_cuda:
        import triton

        if not triton.knobs.runtime.interpret:
            return (
                f"tokens are on {tokens.device} and Triton's interpreter, which runs there, is off"
            )
    if type(activation) not in (SwiGLU, SiLU):
        return "the activation is neither SwiGLU nor SiLU"
    if biases:
        return "experts have biases"
    if up.device != tokens.device or down.device != tokens.device:
        return "matrices are not where tokens are"
    if tokens.dtype not in _DTYPES and (tokens.is_cuda or tokens.dtype != torch.float64):
        return f"tokens are {tokens.dtype}"
    return None


def fused(
    tokens: torch.Tensor,
    gates: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    transposed: bool,
    activation: Activation,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts; see `kernels.function.Fused`."""
    from dynoffload.moe.kernels.function import Fused

    up, down = up.to(tokens.dtype), down.to(tokens.dtype)
    with torch.autocast(tokens.device.type, enabled=False):
        made: torch.Tensor = Fused.apply(  # type: ignore[no-untyped-call]
            tokens, gates, up, down, routing, transposed, activation.parts == 2, dtype
        )
    return made
