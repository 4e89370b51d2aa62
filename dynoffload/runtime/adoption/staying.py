"""What stays in memory beside the device, counted ahead: small parameters with their gradients and
optimizer state, the optimizer's scalars, and buffers.

What it is: the same count that divides a budget at the start (`dynoffload.runtime.sizing`), made
anew when the model has changed. What it is not: a measurement of what is there by now, which is
`counting.ordinary_bytes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.memory.device import Device
from dynoffload.memory.local import local_bytes
from dynoffload.runtime.counting import SCALARS, States, is_trained, parts_of


def beside(parameter: nn.Parameter, states: States) -> int:
    """Return the bytes of the gradient and the optimizer state of ``parameter``, once it has them,
    without scalars."""
    return sum(states.sizes(parameter)) + (local_bytes(parameter) if is_trained(parameter) else 0)


def staying_bytes(
    model: nn.Module,
    optimizer: Optimizer | None,
    device: Device,
    *,
    whole: Collection[nn.Parameter],
    sliced: Collection[nn.Parameter],
    held: Collection[nn.Parameter] = (),
    least: int,
) -> int:
    """Return the bytes that will stay in memory when all has gradients and state.

    Args:
        model: the root.
        optimizer: its optimizer, or None.
        device: what lies there by now does not count.
        whole: parameters that are paged whole.
        sliced: parameters that are paged by slices.
        held: parameters whose memory somebody else holds, who is told if that is too much.
        least: smaller state is not paged, but with a parameter that is as small.
    """
    total = 0
    states = States(optimizer)
    resident: list[torch.Tensor] = list(model.buffers())
    for parameter in model.parameters():
        if parameter in held:
            continue
        if is_trained(parameter) and states.sizes(parameter):
            total += SCALARS
        if parameter in sliced:
            sizes = _states_outside(parameter, optimizer, states, device)
            total += sum(size for size in sizes if size != parameter.nbytes)
        elif parameter in whole:
            sizes = _states_outside(parameter, optimizer, states, device)
            total += sum(size for size in sizes if size < min(least, local_bytes(parameter)))
        else:
            resident.append(parameter)
            total += beside(parameter, states)
    return total + sum(storage.nbytes() for storage in _outside(resident, device))


def _states_outside(
    parameter: nn.Parameter, optimizer: Optimizer | None, states: States, device: Device
) -> list[int]:
    """Return the bytes of each tensor of state outside of ``device``, there or still to come."""
    entry = {} if optimizer is None else dict.get(optimizer.state, parameter) or {}
    kept = [one for one in entry.values() if isinstance(one, torch.Tensor) and one.numel() > 1]
    if not kept:
        return states.coming(parameter)
    strided = torch.strided
    return [local_bytes(t) for t in kept if t.layout != strided or device.owner(t) < 0]


def resident_storages(model: nn.Module, device: Device) -> list[torch.UntypedStorage]:
    """Return the storages of parameters and buffers of ``model`` outside of ``device``."""
    return _outside([*model.parameters(), *model.buffers()], device)


def _outside(tensors: Iterable[torch.Tensor], device: Device) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    for part in (part for tensor in tensors for part in parts_of(tensor)):
        if not part.is_meta and device.owner(part) < 0:
            storage = part.untyped_storage()
            found[storage._cdata] = storage
    return list(found.values())
