"""Counts external references to a tensor's memory; such a tensor cannot move.

A tensor moves by getting other memory (`Tensor.data`), so references to the tensor follow. A view,
a numpy array or a graph keeps the old memory, and would read and write there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from dynoffload.distributed.sharded import aliases_of
from dynoffload.memory.accelerator.guarded import kind_of
from dynoffload.memory.local import local, local_bytes
from dynoffload.memory.region_allocator import users_of
from dynoffload.memory.reused import is_reused
from dynoffload.units import format_bytes

_OF_STATE = 2  # references to a state tensor: its dict, and the update's copy of it


def references(values: dict[Any, Any], key: object) -> int:
    """Return how many references ``values[key]`` has, with the one in ``values``; 0 if absent.

    C code does the counting: the references that bytecode adds for arguments and on its stack
    differ between Python versions. A caller's local variable counts like any other reference.
    """
    if not dict.__contains__(values, key):
        return 0
    return next(map(sys.getrefcount, (dict.__getitem__(values, key),))) - _OF_COUNTING


_OF_COUNTING = 0
_OF_COUNTING = references({0: object()}, 0) - 1


def has_its_own(model: nn.Module) -> bool:
    """Return whether all parameters of ``model`` are its own; `functional_call` swaps in others."""
    return all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def held_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of ``model`` whose memory has references other than its parameters and
    their aliases, in this process or, as shared memory, in another."""
    parameters = [p for p in model.parameters() if p.layout is torch.strided and not p.is_meta]
    storages = [local(parameter).untyped_storage() for parameter in parameters]
    counts = Counter(storage._cdata for storage in storages)
    for aliases in aliases_of(model).values():
        counts.update(one.untyped_storage()._cdata for one in aliases)
    return {
        parameter
        for parameter, storage in zip(parameters, storages, strict=True)
        # The storage's own Python object is one user.
        if users_of(storage) > counts[storage._cdata] + 1 or is_between_processes(storage)
    }


def is_torchs(tensor: torch.Tensor) -> bool:
    """Return whether torch allocated the memory of ``tensor`` and no other process shares it.

    Other memory may belong to an array (`torch.from_numpy`), which would not follow a move. Tensors
    read from files look the same, so callers use this only where such tensors do not occur.
    """
    storage = local(tensor).untyped_storage()
    plain = bool(storage.resizable()) or is_reused(storage)
    return plain and not is_between_processes(storage)


def is_between_processes(storage: torch.UntypedStorage) -> bool:
    """Return whether another process may have the same memory. CUDA memory is excluded: torch
    reports all of it as shared, because it could be."""
    return storage.device.type == "cpu" and bool(storage.is_shared())


def holders(tensor: torch.Tensor) -> int:
    """Return how many tensors reference the memory of ``tensor``, itself included."""
    return users_of(local(tensor).untyped_storage()) - 1


def are_shared(state: dict[str, Any], besides: Container[str]) -> bool:
    """Return whether a tensor of ``state`` has external references; keys in ``besides`` are
    skipped."""
    return any(
        isinstance(state[key], torch.Tensor)
        and (
            references(state, key) > _OF_STATE  # iterating items() would add a reference
            or state[key].layout is not torch.strided
            or holders(state[key]) > 1
        )
        for key in state
        if key not in besides
    )


def held_text(model: nn.Module) -> str:
    """Return a text on parameters that cannot move, or "" if all can."""
    held = held_parameters(model)
    named = ((name, p) for name, p in model.named_parameters() if p in held)
    name, first = next(named, ("", None))
    if not name:
        return ""
    kind = (
        "" if first is not None and kind_of(first) is nn.Parameter else f" ({type(first).__name__})"
    )
    nbytes = sum(local_bytes(parameter) for parameter in held)
    return (
        f"; {format_bytes(nbytes)} of parameters stay in memory because something else holds it "
        f"too: let go of the views, arrays, state_dicts or graphs of {name!r}{kind} and others"
    )
