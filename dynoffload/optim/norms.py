"""The norm of all gradients, and whether they are finite, wherever they are by now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from dynoffload.optim.reading import Reading
from dynoffload.optim.shelves import Entry


def norms_in_place(entries: Iterable[Entry], order: float, reading: Reading) -> list[torch.Tensor]:
    """Return the norms of the gradients that parameters have.

    Args:
        entries: in the order of the result; those without a gradient are passed over.
        order: of the norm.
        reading: what was made of gradients so far: unscaled, and clipped.
    """
    found = []
    for entry in entries:
        gradient = entry.parameter.grad
        if gradient is not None:
            found.append(torch.linalg.vector_norm(reading.seen(gradient), order))
    return found


def are_finite_in_place(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether every element of the gradients that parameters have is a finite number."""
    largest = [
        torch.linalg.vector_norm(parameter.grad, torch.inf).float()
        for parameter in parameters
        if parameter.grad is not None and parameter.grad.numel()
    ]
    return not largest or bool(torch.stack(largest).isfinite().all())


def total_norm(norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Return the norm of all, from each gradient's, as `torch.nn.utils.get_total_norm` does with
    ``foreach=False``: stacked by dtype, in the order in which torch groups them."""
    if not norms:
        return torch.tensor(0.0)
    grouped = _group_tensors_by_device_and_dtype([list(norms)])
    ordered = [norm for (some,), _ in grouped.values() for norm in some if norm is not None]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), order)
    return total
