"""The open blocks of ``offload()``, by the model that each manages."""

from __future__ import annotations

from typing import Protocol

from torch import nn
from torch.optim import Optimizer


class Manager(Protocol):
    """A session, as seen by code that must not touch its model."""

    model: nn.Module
    optimizer: Optimizer | None


managers: dict[int, Manager] = {}
"""Open blocks, by the id of their root module."""


def is_managed(model: nn.Module) -> bool:
    """Return whether parameters of ``model`` are inside an offload() block."""
    mine = {id(parameter) for parameter in model.parameters()}
    return any(id(p) in mine for one in managers.values() for p in one.model.parameters())
