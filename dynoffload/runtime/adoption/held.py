"""Counts external references to a tensor's memory, for which the tensor cannot move.

A tensor is moved by giving it other memory (`Tensor.data`), so whoever holds the tensor follows. A
view, a numpy array or a graph keeps the old memory, and would read and write there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from dynoffload.distributed.sharded import aliases_of
from dynoffload.memory.local import local
from dynoffload.memory.region_allocator import users_of
from dynoffload.memory.reused import is_reused

_OF_STATE = 2  # references to a tensor of state: its dict, and the update's copy


def references(values: dict[Any, Any], key: object) -> int:
    """Return how many references there are to ``values[key]``, that of ``values`` included; 0
    where there is none.

    Code in C counts here: what bytecode adds for arguments and on its stack differs between
    versions of Python. A local variable of a caller counts as any other holder.
    """
    if not dict.__contains__(values, key):
        return 0
    return next(map(sys.getrefcount, (dict.__getitem__(values, key),))) - _OF_COUNTING


_OF_COUNTING = 0
_OF_COUNTING = references({0: object()}, 0) - 1


def has_its_own(model: nn.Module) -> bool:
    """Return whether all parameters of ``model`` are its own: a functional call lends it others."""
    return all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def held_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of ``model`` whose memory somebody holds who is none of them, in this
    process or, as it is shared memory, in another."""
    parameters = [p for p in model.parameters() if p.layout is torch.strided and not p.is_meta]
    storages = [local(parameter).untyped_storage() for parameter in parameters]
    counts = Counter(storage._cdata for storage in storages)
    for aliases in aliases_of(model).values():
        counts.update(one.untyped_storage()._cdata for one in aliases)
    return {
        parameter
        for parameter, storage in zip(parameters, storages, strict=True)
        # One user is the storage's own object.
        if users_of(storage) > counts[storage._cdata] + 1 or is_between_processes(storage)
    }


def is_torchs(tensor: torch.Tensor) -> bool:
    """Return whether the memory of ``tensor`` is torch's and this process's alone.

    Memory that came from elsewhere may be an array's (`torch.from_numpy`), which would not follow.
    Tensors that were read from files look alike, so this is asked only where those do not come.
    """
    storage = local(tensor).untyped_storage()
    plain = bool(storage.resizable()) or is_reused(storage)
    return plain and not is_between_processes(storage)


def is_between_processes(storage: torch.UntypedStorage) -> bool:
    """Return whether another process may have the same memory. torch says so of all memory of CUDA
    devices, as any of it can be shared; it is not, until somebody does."""
    return storage.device.type == "cpu" and bool(storage.is_shared())


def holders(tensor: torch.Tensor) -> int:
    """Return how many tensors hold the memory of ``tensor``, which is one of them."""
    return users_of(local(tensor).untyped_storage()) - 1


def are_shared(state: dict[str, Any], besides: Container[str]) -> bool:
    """Return whether somebody holds a tensor of a parameter's ``state``, but those ``besides``."""
    return any(
        isinstance(state[key], torch.Tensor)
        and (
            references(state, key) > _OF_STATE  # items would hold it as well
            or state[key].layout is not torch.strided
            or holders(state[key]) > 1
        )
        for key in state
        if key not in besides
    )
