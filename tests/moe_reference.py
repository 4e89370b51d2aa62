"""The loop over experts that everybody writes, and what is shared by the tests of mixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def choice(length: int, count: int, k: int, seed: int = 0) -> Tensor:
    """Return ``k`` of ``count`` experts for each token."""
    drawn = torch.Generator().manual_seed(seed)
    if not length:
        return torch.zeros(0, k, dtype=torch.int64)
    return torch.stack([torch.randperm(count, generator=drawn)[:k] for _ in range(length)])


def loop(
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    between: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return what `experts` is to return."""
    out = torch.zeros_like(x)
    for expert in range(len(up)):
        token, place = torch.where(chosen == expert)
        first = F.linear(x[token], up[expert], None if up_bias is None else up_bias[expert])
        if between is None:
            a, b = first.chunk(2, -1)
            made = F.silu(a) * b
        else:
            made = between(first)
        last = F.linear(made, down[expert], None if down_bias is None else down_bias[expert])
        out = out.index_add(0, token, last * gates[token, place, None])
    return out


def inputs(
    length: int = 40, d: int = 12, h: int = 20, count: int = 5, k: int = 2, parts: int = 2
) -> list[Tensor]:
    """Return tokens, gates, and both matrices, in float64."""
    torch.manual_seed(1)
    shapes = [(length, d), (length, k), (count, parts * h, d), (count, d, h)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-11)


class Allocations(TorchDispatchMode):
    """Notes the rows of every matrix that has as many columns as tokens have, and the most
    elements of any tensor of numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.most, self.elements = width, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] == self.width:
                self.most = max(self.most, len(one))
            if isinstance(one, Tensor) and one.is_floating_point():
                self.elements = max(self.elements, one.numel())
        return result
