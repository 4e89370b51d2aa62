"""ATen calls: what an operator overload does to its arguments, and which tensors these are.

[Note: versions]  Below a dispatch mode, torch does not count the writes of operators over lists. A
backward that needs an overwritten value would then not be refused. So modes count these writes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynoffload.runtime.counting import parts_of

_NOTHING = contextlib.nullcontext()
_functorch = torch._C._functorch


@dataclass(frozen=True)
class Effects:
    """What an overload does.

    Attributes:
        written: name and position of each argument that it writes to.
        draws: whether it draws random numbers.
        known: whether it is one of PyTorch's own, and thus deterministic for given arguments.
    """

    written: tuple[tuple[str, int], ...]
    draws: bool
    known: bool


# Writes that a schema does not declare: running statistics of batch normalization.
_UNDECLARED = {torch.ops.aten.native_batch_norm.default: (("running_mean", 3), ("running_var", 4))}
_UNFOLLOWED = {"set_", "resize_", "resize_as_", "resize", "_resize_output_", "swap_tensors"}


@functools.cache
def effects_of(func: Any) -> Effects:
    """Return what ``func``, an overload, does to memory."""
    schema = func._schema
    written = tuple(
        (argument.name, place)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ) + _UNDECLARED.get(func, ())
    return Effects(
        written=written,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        known=func.namespace in ("aten", "prims")
        and schema.name.split("::")[-1] not in _UNFOLLOWED,
    )


@functools.cache
def writes_lists(func: Any) -> bool:
    """Return whether an operator writes to a list of tensors."""
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and str(argument.type).startswith("List")
        for argument in func._schema.arguments
    )


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    places = effects_of(func).written
    return [args[at] if at < len(args) else kwargs.get(name) for name, at in places]


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
    if not writes_lists(func):
        return _NOTHING
    return _counted(list(tensors_of(written_by(func, args, kwargs))))


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results, also in lists and dicts of any depth."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_of(value)


def replaced(values: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Return ``values`` with ``change`` applied to each of ``kind``, at any depth of lists."""
    if isinstance(values, kind):
        return change(values)
    if type(values) in (list, tuple):
        return type(values)([replaced(value, change, kind) for value in values])
    if type(values) is dict:
        return {name: replaced(value, change, kind) for name, value in values.items()}
    return values


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor below the wrappers of `torch.func`."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def held_by(values: Any) -> Iterator[torch.Tensor | torch.UntypedStorage]:
    """Yield the tensors and storages in arguments, also in lists."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            value = unwrapped(value)
            if value.layout is torch.strided:
                yield value
            else:
                yield from parts_of(value)
        elif isinstance(value, torch.UntypedStorage):
            yield value
        elif isinstance(value, torch.storage.TypedStorage):
            yield value._untyped_storage
        elif isinstance(value, list | tuple | dict):
            yield from held_by(value)


def is_list_of_tensors(value: Any) -> bool:
    """Return whether an argument is a list with tensors in it."""
    return isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value)


def part_of(args: Sequence[Any], count: int, begin: int, end: int) -> tuple[Any, ...]:
    """Return arguments with their lists of ``count`` cut to those from ``begin`` to ``end``."""
    return tuple(
        one[begin:end] if isinstance(one, list | tuple) and len(one) == count else one
        for one in args
    )


def in_parts(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fit: Callable[[tuple[Any, ...]], bool],
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
) -> Any:
    """Run an operator over lists in parts, as it treats each tensor of a list separately.

    Args:
        args: its arguments; the longest lists are cut.
        kwargs: its keyword arguments.
        fit: whether these ``args`` can run at once; a single element of the lists always runs.
        run: the operator.

    Returns:
        Its results, or None if it has none.
    """
    count = max(len(one) for one in args if is_list_of_tensors(one))
    results: list[Any] = []
    begin = 0
    while begin < count:
        end = begin + 1
        while end < count and fit(part_of(args, count, begin, end + 1)):
            end += 1
        more = {key: part_of((one,), count, begin, end)[0] for key, one in kwargs.items()}
        made = run(part_of(args, count, begin, end), more)
        if made is not None:
            results += made
        begin = end
    return results or None
