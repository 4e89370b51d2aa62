"""Names what passes a budget: the largest tensor outside of the device, and why it is there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.device import Device
from dynoffload.memory.local import local_bytes
from dynoffload.runtime.counting import parts_of
from dynoffload.runtime.updates.kept_state import state_of


def largest_outside(
    model: nn.Module, optimizer: Optimizer | None, device: Device
) -> tuple[str, int, str]:
    """Return the name of the largest tensor outside of ``device``, the bytes of its memory and what
    it is; "", 0 and "" if there is none. It reads no content."""
    found = "", 0, ""
    for name, tensor, kind in _tensors(model, optimizer):
        parts = [] if tensor.is_meta else [p for p in parts_of(tensor) if device.owner(p) < 0]
        nbytes = sum(part.untyped_storage().nbytes() for part in parts)
        if nbytes > found[1]:
            part = " that is part of a larger tensor" if nbytes > local_bytes(tensor) else ""
            found = repr(name), nbytes, f", a {kind}{part}"
    return found


def _tensors(
    model: nn.Module, optimizer: Optimizer | None
) -> Iterator[tuple[str, torch.Tensor, str]]:
    names: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        yield name, parameter, "parameter"
        gradient = parameter.grad if parameter.is_leaf else None
        if gradient is not None:
            by_graph = "gradient of backward(create_graph=True)"
            yield f"{name}.grad", gradient, by_graph if gradient.requires_grad else "gradient"
    for name, buffer in model.named_buffers():
        yield name, buffer, "buffer"
    if optimizer is not None and not isinstance(optimizer, HostOptimizer):
        for name, tensor in state_of(optimizer, names):
            yield name, tensor, "tensor of optimizer state"
