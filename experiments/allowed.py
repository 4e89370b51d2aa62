"""The budget of an exactness case: a share of its state, or the least accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynoffload.config import OffloadConfig
from dynoffload.errors import BudgetError
from dynoffload.runtime.sizing import sizing_of
from dynoffload.units import format_bytes

CONFIG: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": 1024, "step_aside": False}
"""Options that page networks of a few hundred kilobytes, and never switch to resident mode."""


@dataclass(frozen=True)
class Allowed:
    """Sizes and budget of a case.

    Attributes:
        whole: bytes of parameters, gradients and optimizer state.
        budget: in bytes.
        above_share: why the budget exceeds both a quarter of the whole and three times the largest
            parameter, or "" if it does not.
    """

    whole: int
    budget: int
    above_share: str = ""


def budget_of(
    model: Any, optimizer: Any, backend: str = "auto", config: Mapping[str, Any] | None = None
) -> Allowed:
    """Return the largest of a quarter of parameters, gradients and optimizer state, three times
    the largest parameter, and the least budget that is accepted.

    Args:
        model: to be trained.
        optimizer: of its parameters.
        backend: see `OffloadConfig`.
        config: options that override `CONFIG`.
    """
    options = OffloadConfig.of({**CONFIG, "backend": backend, **(config or {})})
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    whole = sizing_of(model, optimizer, 1 << 40, options).states_bytes
    share = max(whole // 4, 3 * max(sizes))
    try:
        sizing_of(model, optimizer, share, options)
    except BudgetError as error:
        if not error.lacking:
            raise
        budget = share + error.lacking
        small = format_bytes(sizing_of(model, optimizer, budget, options).small_bytes)
        return Allowed(whole, budget, f"{error}; the smaller tensors take {small}")
    return Allowed(whole, share)
