"""What an ATen overload does to its arguments, from its schema, asked once for each overload.

[Note: versions]  Below a dispatch mode torch does not count the writes of operators over lists, so
that a backward that needs what was written over would not be refused. Modes count them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Effects:
    """What is known of an overload.

    Attributes:
        written: names and places of the arguments that it writes into.
        draws: it draws random numbers.
        known: it is one of PyTorch's own, which given the same makes the same.
    """

    written: tuple[tuple[str, int], ...]
    draws: bool
    known: bool


# Writes that a schema does not tell of: running statistics of batch normalization.
_UNTOLD = {torch.ops.aten.native_batch_norm.default: (("running_mean", 3), ("running_var", 4))}
_UNFOLLOWED = {"set_", "resize_", "resize_as_", "resize", "_resize_output_", "swap_tensors"}


@functools.cache
def effects_of(func: Any) -> Effects:
    """Return what ``func``, an overload, does to memory."""
    schema = func._schema
    written = tuple(
        (argument.name, place)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ) + _UNTOLD.get(func, ())
    return Effects(
        written=written,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        known=func.namespace in ("aten", "prims")
        and schema.name.split("::")[-1] not in _UNFOLLOWED,
    )


@functools.cache
def _writes_lists(func: Any) -> bool:
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and str(argument.type).startswith("List")
        for argument in func._schema.arguments
    )


@contextlib.contextmanager
def _counted(tensors: list[torch.Tensor]) -> Iterator[None]:
    before = [(one, one._version) for one in tensors if not one.is_inference()]
    try:
        yield
    finally:
        for one, version in before:
            if one._version == version:
                torch.autograd.graph.increment_version(one)


def counting_writes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Count what an operator writes within a block; see [Note: versions]."""
    if not _writes_lists(func):
        return _NOTHING
    places = effects_of(func).written
    given = [args[at] if at < len(args) else kwargs.get(name) for name, at in places]
    return _counted(list(tensors_of(given)))


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results: themselves, or in lists of any depth."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_of(value)


def replaced(values: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Return ``values`` with each of ``kind``, at any depth of lists, changed."""
    if isinstance(values, kind):
        return change(values)
    if type(values) in (list, tuple):
        return type(values)([replaced(value, change, kind) for value in values])
    if type(values) is dict:
        return {name: replaced(value, change, kind) for name, value in values.items()}
    return values
