"""Finds all tensors that an optimizer keeps: in its state, its groups and its attributes.

Optimizers of `torch.optim` keep one tensor per parameter and key. Others also keep tensors in
lists, tuples, queues, sets, mappings, namespaces and dataclasses, and in optimizers they wrap.
"""

from __future__ import annotations

import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

_DEPTH = 5  # nesting depth of containers
_ITS_OWN = ("state", "param_groups", "defaults")


def tensors_within(
    value: Any, name: str, depth: int = _DEPTH
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in ``value``, a tensor or nested containers, with names that begin with
    ``name``. No tensor data is read."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth:
        for key, item in _items(value):
            yield from tensors_within(item, f"{name}.{key}", depth - 1)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(dict.items(value))  # ObservedState.items() would make pending updates
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | deque | set | frozenset | UserList):
        return list(enumerate(value))
    if isinstance(value, SimpleNamespace):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return []


def state_of(
    optimizer: Optimizer, names: dict[torch.Tensor, str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors, with names, that ``optimizer`` and the optimizers it wraps keep, except
    parameters.

    Args:
        optimizer: any optimizer.
        names: names of parameters.
    """
    names = names or {}
    for one in (optimizer, *wrapped_by(optimizer)):
        for key, entry in _items(getattr(one, "state", {})):
            owner = names.get(key, "a parameter") if isinstance(key, torch.Tensor) else str(key)
            yield from tensors_within(entry, owner)
        for number, group in enumerate(getattr(one, "param_groups", ())):
            kept = {key: value for key, value in group.items() if key != "params"}
            yield from tensors_within(kept, f"group {number}")
        for key, value in tuple(vars(one).items()):
            if key not in _ITS_OWN and not key.startswith("_optimizer_"):
                yield from tensors_within(value, key)


def wrapped_by(
    optimizer: Optimizer, through: Callable[[Optimizer], bool] = lambda _: True
) -> list[Optimizer]:
    """Return the optimizers that ``optimizer`` wraps, each once.

    They are found in its attributes, including containers. The search continues in the attributes
    of those for which ``through`` returns True.
    """
    found = [optimizer]
    for one in found:  # the list grows during the loop
        for key, value in tuple(vars(one).items()) if one is optimizer or through(one) else ():
            for held in _optimizers_in(value) if key not in _ITS_OWN else ():
                if all(held is not known for known in found):
                    found.append(held)
    return found[1:]


def _optimizers_in(value: Any, depth: int = 2) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif depth:
        for _, item in _items(value):
            yield from _optimizers_in(item, depth - 1)
