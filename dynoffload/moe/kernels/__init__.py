"""Experts on a GPU, by Triton.

`refusal` says whether the kernels can take a call; `routed` and `fused` run them. Triton is
imported at the first call that is taken. Where it is missing, experts go one by one, which is
logged once.

The kernels have run in Triton's interpreter only, not on a GPU.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dynoffload.moe.activations import Activation, SiLU, SwiGLU
from dynoffload.moe.routing import Routing

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Return whether Triton is installed; log once where it is not."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning(
            "triton is not installed, so experts on a GPU go one by one; "
            "pip install 'dynoffload[triton]'"
        )
    return found


def watched() -> bool:
    """Return whether a mode sees each operator; it would not see what kernels read."""
    return _get_current_dispatch_mode() is not None


def suits(*tensors: torch.Tensor) -> bool:
    """Return whether kernels are taken for tensors without being asked for."""
    plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors)
    return plain and all(one.is_cuda for one in tensors) and not watched() and available()


def missing(tensor: torch.Tensor) -> str | None:
    """Return what kernels lack to run where a tensor is, in words, or None."""
    if not available():
        return "triton is not installed"
    if tensor.is_cuda:
        return None
    import triton

    if triton.knobs.runtime.interpret:
        return None
    return f"tensors are on {tensor.device} and Triton's interpreter, which runs there, is off"


def refusal(
    tokens: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    biases: bool,
    activation: Activation,
) -> str | None:
    """Return why the kernels cannot compute these experts, in words, or None.

    Args:
        tokens: (L, d).
        up: the first matrices, of the right shape.
        down: the second matrices, too.
        biases: there are any.
        activation: between the products.
    """
    if why := missing(tokens):
        return why
    if type(activation) not in (SwiGLU, SiLU):
        return "the activation is neither SwiGLU nor SiLU"
    if biases:
        return "experts have biases"
    if up.device != tokens.device or down.device != tokens.device:
        return "matrices are not where tokens are"
    if tokens.dtype not in _DTYPES and (tokens.is_cuda or tokens.dtype != torch.float64):
        return f"tokens are {tokens.dtype}"
    return None


def routed(
    chosen: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the parts of a `Routing`, and what is wrong with the choice.

    Args:
        chosen: int64, (L, k), neither of them 0.
        experts: E.

    Returns:
        ``expert_token_indices``, ``expert_token_offsets`` and ``token_index_map``; and one int64:
        2 where numbers are beyond the experts, 1 where a token names one twice, 0 otherwise. The
        others mean nothing unless it is 0.
    """
    from dynoffload.moe.kernels import indexing

    chosen = chosen.contiguous()
    with indexing.on(chosen.device):
        bounds, wrong = indexing.bounds_of(chosen, experts)
        order, places = indexing.places_of(chosen, bounds, experts)
    return order, bounds[0, : experts + 1].long(), places, wrong.max().long()


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
    """Return the sum of each token's experts; see `dynoffload.moe.computation.experts`.

    Args:
        tokens: (L, d), of the dtype in which products are made.
        gates: (L, k).
        up: (E, p·h, d).
        down: (E, d, h).
        routing: not without any choice of an expert.
        transposed: ``up`` is (E, d, p·h) and ``down`` (E, h, d).
        activation: `SwiGLU` or `SiLU`.
        dtype: of the result, (L, d).
    """
    from dynoffload.moe.kernels.function import Fused

    up, down = up.to(tokens.dtype), down.to(tokens.dtype)
    with torch.autocast(tokens.device.type, enabled=False):
        made: torch.Tensor = Fused.apply(  # type: ignore[no-untyped-call]
            tokens, gates, up, down, routing, transposed, activation.parts == 2, dtype
        )
    return made
