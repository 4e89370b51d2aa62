"""The arguments of an ATen call: tensors and storages in them, and lists cut into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dynoffload.runtime.counting import parts_of

_functorch = torch._C._functorch


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor below the wrappers of `torch.func`."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def held_by(values: Any) -> Iterator[torch.Tensor | torch.UntypedStorage]:
    """Yield the tensors and storages in arguments, also in lists."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            while _functorch.is_functorch_wrapped_tensor(value):
                value = _functorch.get_unwrapped(value)
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
    """Run an operator over lists part by part, as each tensor of a list is treated by itself.

    Args:
        args: its arguments, of which the lists of the greatest length are cut.
        kwargs: those by name.
        fit: whether so much of ``args`` can be run at once; a single place of the lists is anyway.
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
