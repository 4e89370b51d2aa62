"""Experts of fused layers as units: their names, and which of them a call of the layer runs.

A *fused* layer holds all its experts in parameters of three dimensions, one slice for each. It is
called with the indices of the experts that its tokens chose, so what it runs is known before it
runs, whatever implementation computes it. A unit is a module, or one expert of such a layer; the
expert's path is the layer's path and a number, as in ``layers.0.mlp.experts[3]``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_EXPERT = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
_INDICES = (torch.int64, torch.int32)


def unit_path(site: str, part: int) -> str:
    """Return the path of one expert of the layer at ``site``, or the name of a tensor's slice."""
    return f"{site}[{part}]"


def split_path(path: str) -> tuple[str, int | None]:
    """Return the site and the part of a unit's path; the part of a module is None."""
    found = _EXPERT.fullmatch(path)
    return (path, None) if found is None else (found[1], int(found[2]))


def slices_in(module: nn.Module) -> dict[str, int]:
    """Return the fused parameters of a module by name, each with its number of slices; empty unless
    they all have the same number."""
    found = {n: len(p) for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    counts = set(found.values())
    return found if len(counts) == 1 and min(counts) > 1 else {}


def indices_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the indices of experts that a fused layer is called with, ``[tokens, chosen]``, or
    None: integers with a row for each token of the first tensor beside them, the hidden states.

    Args:
        module: the layer.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """
    count = next(iter(slices_in(module).values()), 0)
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)] if count else []
    hidden = next((a for a in given if a.is_floating_point() and a.dim() > 1), None)
    if hidden is None:
        return None
    width, tokens = hidden.shape[-1], math.prod(hidden.shape[:-1])
    fused = (p for p in module._parameters.values() if p is not None and p.dim() == 3)
    if not all(width in p.shape[1:] for p in fused):
        return None
    return next(
        (
            a
            for a in given
            if a.dtype in _INDICES and a.dim() == 2 and len(a) == tokens and a.shape[1] <= count
        ),
        None,
    )


def experts_hit(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[int] | None:
    """Return the experts that a call of a fused layer runs, in order, or None if it does not say.

    Layers run experts in ascending order. An index equal to their number means no expert here.
    Arguments are those of `indices_of`.
    """
    indices = indices_of(module, args, kwargs)
    if (
        indices is None
        or indices.is_meta
        or torch._C._functorch.is_functorch_wrapped_tensor(indices)
    ):
        return None
    count = next(iter(slices_in(module).values()))
    values = torch.unique(indices.detach()).tolist()
    if values and (values[0] < 0 or values[-1] > count):
        return None  # no indices of experts
    return [number for number in values if number < count]
