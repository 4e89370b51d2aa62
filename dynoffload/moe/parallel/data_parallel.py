"""Combines expert parallelism with data parallelism: `keep_apart` and `clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynoffload.moe.parallel.exchange import Exchange
from dynoffload.moe.parallel.layer import SHARDED, ExpertParallel


def keep_apart(model: nn.Module) -> list[str]:
    """Exclude the experts of `ExpertParallel` layers from `DistributedDataParallel`.

    Call it before wrapping ``model``, on all ranks. The wrapper averages gradients over ranks, but
    those of experts belong to the sum of the ranks' losses. Divide these by the number of ranks
    after backward, and all gradients are of the mean.

    Returns:
        The excluded names.
    """
    names = [f"{path}.{name}" if path else name for path, _ in _layers(model) for name in SHARDED]
    known = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    at_root = [f".{name}" for name in names if "." not in name]  # as DDP's reducer spells them
    ignore(model, [*known, *names, *at_root])
    return names


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of ``model`` by their norm over all ranks, as `torch.nn.utils` does.

    `torch.nn.utils.clip_grad_norm_` sees only this rank's experts, so each rank would scale
    replicated gradients differently and their weights would diverge. Collective: all ranks call it,
    after gradients of replicated parameters, and of experts that several groups hold, are equal
    on all ranks that hold them.

    Args:
        model: with `ExpertParallel` layers, or a wrapper around it.
        max_norm: of all gradients together.
        norm_type: p; `inf` for the largest.
        error_if_nonfinite: whether to raise on all ranks if the norm is not finite.

    Returns:
        The norm before clipping, (), equal on all ranks, in the widest dtype of the parameters.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        ExchangeError: a rank did not arrive in time.
    """
    apart: dict[int, Exchange] = {}  # by id of experts' parameters
    for _, layer in _layers(model):
        apart.update({id(getattr(layer, name)): layer.exchange for name in SHARDED})
    given = [one for one in model.parameters() if one.grad is not None]
    if all(exchange.world == 1 for exchange in apart.values()):
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite)
    device = next(iter(model.parameters())).device
    norms = [_norm([one for one in given if id(one) not in apart], norm_type)]
    for group, exchange in {id(one.group): one for one in apart.values()}.items():
        own = [one for one in given if id(one) in apart and id(apart[id(one)].group) == group]
        found = exchange.gathered([_norm(own, norm_type)], device, "norms of gradients")
        norms += [one for (one,) in found]
    joined: torch.Tensor = torch.linalg.vector_norm(
        torch.tensor(norms, dtype=torch.float64), norm_type
    )
    # The widest dtype of all parameters, since ranks may lack gradients of different ones.
    norm = joined.to(max((one.dtype for one in model.parameters()), key=_width))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients of all ranks is {norm.item()}, and "
            "cannot be clipped; without error_if_nonfinite=True they are scaled all the same"
        )
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm)
    return norm


def _layers(model: nn.Module) -> Iterator[tuple[str, ExpertParallel]]:
    for path, module in model.named_modules():
        if isinstance(module, ExpertParallel):
            yield path, module


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _norm(parameters: list[nn.Parameter], order: float) -> float:
    """Return the norm of the gradients of parameters, all of which have one."""
    norms = [torch.linalg.vector_norm(one.grad, order, dtype=torch.float64) for one in parameters]
    return float(torch.linalg.vector_norm(torch.stack(norms), order)) if norms else 0.0
