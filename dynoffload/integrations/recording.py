"""Tensors that record how they are stacked, concatenated and split, without any memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dynoffload.runtime.file_parts import FileValue, concatenated, stacked


class Recorded(torch.Tensor):
    """A tensor without memory that has a known value in files.

    Operators that stack, concatenate or split return others; all else returns tensors on the meta
    device.

    Attributes:
        value: what it is made of.
    """

    value: FileValue

    @staticmethod
    def __new__(cls, value: FileValue) -> Recorded:
        """Return a tensor with the shape and the parts of ``value``."""
        make: Callable[..., Recorded] = torch.Tensor._make_wrapper_subclass
        made = make(cls, value.shape, device="meta")
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; see the class."""
        known = _OPERATORS.get(func.overloadpacket)
        first = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        if known is not None and all(isinstance(one, cls) for one in first):
            made = known(*args)
            return [cls(one) for one in made] if isinstance(made, list) else cls(made)
        args, kwargs = tree_map_only(cls, _empty, (args, kwargs or {}))
        return func(*args, **kwargs)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator writes into a tensor, which no record shows.

    Attributes:
        seen: whether one did.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        self.seen |= func._schema.is_mutable
        return func(*args, **(kwargs or {}))


def _empty(tensor: Recorded) -> torch.Tensor:
    return torch.empty(tensor.value.shape, device="meta")


def _stack(tensors: Sequence[Recorded], dim: int = 0) -> FileValue:
    one_of_each = {one.value.shape: one for one in tensors}.values()
    shape = torch.stack([_empty(one) for one in one_of_each], dim).shape  # raises as torch does
    return stacked([one.value for one in tensors], dim % len(shape))


def _cat(tensors: Sequence[Recorded], dim: int = 0) -> FileValue:
    shape = torch.cat([_empty(one) for one in tensors], dim).shape
    return concatenated([one.value for one in tensors], dim % len(shape))


def _split(tensor: Recorded, size: int | list[int], dim: int = 0) -> list[FileValue]:
    made, start, dim = [], 0, dim % tensor.dim()
    for part in torch.split(_empty(tensor), size, dim):
        made.append(tensor.value.narrowed(dim, start, start + part.shape[dim]))
        start += part.shape[dim]
    return made


def _same(tensor: Recorded) -> FileValue:
    return tensor.value


_aten = torch.ops.aten
_OPERATORS: dict[Any, Callable[..., FileValue | list[FileValue]]] = {
    _aten.stack: _stack,
    _aten.cat: _cat,
    _aten.split: _split,
    _aten.split_with_sizes: _split,
    _aten.alias: _same,
    _aten.clone: _same,
    _aten.detach: _same,
}
