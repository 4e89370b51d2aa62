"""What tells whether a step that has failed has changed anything: identities and versions."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

Marks = dict[str | None, tuple[int, int]]
"""Identity and version of a parameter, by None, and of the values of its state, by their keys."""


def marks_of(optimizer: Optimizer, parameter: torch.Tensor) -> Marks:
    """Return what is another once ``parameter``, or a value of its state, was changed."""
    state = dict.get(optimizer.state, parameter) or {}
    values = {key: (id(value), getattr(value, "_version", 0)) for key, value in state.items()}
    return {None: (id(parameter), parameter._version), **values}


def is_changed(before: Marks, after: Marks) -> bool:
    """Return whether something was changed, beyond state that was made and not yet written."""
    return any(before[key] != mark if key in before else mark[1] > 0 for key, mark in after.items())
