"""Replaces the tensor of a parameter, to move it from the meta device to another and back.

``parameter.data = …`` fails for the meta device and for incompatible tensor types, so there the two
tensors are swapped. Attributes that users set on a parameter, such as ``weight.no_decay = True``,
belong to the object and stay with it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.memory.accelerator.guarded import fit, set_data, unguard

_CPU = torch.device("cpu")


def put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Make ``tensor`` hold ``data``, maybe on another device."""
    if torch._has_compatible_shallow_copy_type(unguard(tensor), unguard(data)):
        set_data(tensor, data)
    elif isinstance(tensor, nn.Parameter):
        put_in_place(tensor, data)
    else:
        _swap(tensor, data)


def put_in_place(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Make ``parameter`` hold ``data``, on another device."""
    made = nn.Parameter(unguard(data), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    _swap(parameter, made)


def _swap(tensor: torch.Tensor, made: torch.Tensor) -> None:
    if weakref.getweakrefs(tensor):  # which torch refuses, and leaves in cycles as it compiles
        gc.collect()
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)  # the object keeps them, and its new tensor calls them
    fit(tensor)


def to_meta(parameter: nn.Parameter) -> None:
    """Move ``parameter`` to the meta device, without values."""
    put_in_place(parameter, torch.empty_like(parameter, device="meta"))


def leave_for_meta(parameters: Iterable[nn.Parameter]) -> None:
    """Move all ``parameters`` to the meta device.

    Raises:
        ConfigError: some cannot be moved, as views of them exist; all others were.
    """
    held = 0
    for parameter in parameters:
        if not parameter.is_meta:
            try:
                to_meta(parameter)
            except RuntimeError:
                held += 1
    if held:
        raise ConfigError(
            f"{held} parameters whose weights were cut off cannot go back to the meta device, as "
            "something holds views of them, and have values in part: build the model anew"
        )


def is_held(parameter: nn.Parameter) -> bool:
    """Return whether views of ``parameter`` exist, so that `to_meta` fails."""
    own = 1
    if parameter.requires_grad:  # the node that accumulates its gradient holds it too
        torch.autograd.graph.get_gradient_edge(parameter)
        own = 2
    count: int = parameter._use_count()  # type: ignore[attr-defined]
    return count > own


def zero_buffers(model: nn.Module, device: torch.device = _CPU) -> None:
    """Replace buffers on the meta device by zeros on ``device``; those that share a storage still
    do."""
    # They are not swapped: a view of another buffer cannot be.
    made: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = _zeros_as(buffer, storages, device)
                module._buffers[name] = made[id(buffer)]


def _zeros_as(
    buffer: torch.Tensor, storages: dict[int, torch.UntypedStorage], device: torch.device
) -> torch.Tensor:
    """Return zeros like ``buffer``, in a storage that replaces its own."""
    if buffer.layout is not torch.strided or type(buffer) is not torch.Tensor:
        return torch.zeros_like(buffer, device=device)
    away = buffer.untyped_storage()
    if away._cdata not in storages:
        zeros = torch.zeros(away.nbytes(), dtype=torch.uint8, device=device)
        storages[away._cdata] = zeros.untyped_storage()
    empty = torch.empty(0, dtype=buffer.dtype, device=device)
    storage = storages[away._cdata]
    return empty.set_(storage, int(buffer.storage_offset()), buffer.size(), buffer.stride())
