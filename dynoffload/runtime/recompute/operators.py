"""What an ATen overload does to memory: which arguments it writes, how many bytes it makes.

What it is: facts of schemas, asked once for each overload, and the bytes of results, asked of the
overload's own meta kernel once for each set of shapes. What it is not: a table of operators.

[Note: results of unknown size]  Where shapes depend on values (`nonzero`, a boolean index) the most
that there can be is taken, as far as it is known. A meta kernel that refuses a dtype which the
CPU's takes is asked again for bfloat16. What has none is remembered once it was there; before that
nobody knows, and all that can be dropped is.

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

from dynoffload.runtime.passes.saved import is_plain

_MOST_SHAPES = 4096
_NOTHING = contextlib.nullcontext()
_Key = tuple[Any, ...]


@dataclass(frozen=True)
class Effects:
    """What is known of an overload.

    Attributes:
        written: names and places of the arguments that it writes into.
        makes: it can return memory of its own.
        draws: it draws random numbers.
        dynamic: the shape of its result depends on values.
        known: it is one of PyTorch's own, which given the same makes the same.
    """

    written: tuple[tuple[str, int], ...]
    makes: bool
    draws: bool
    dynamic: bool
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
    returns = [r for r in schema.returns if "Tensor" in str(r.type)]
    return Effects(
        written=written,
        makes=any(one.alias_info is None for one in returns),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        dynamic=torch.Tag.dynamic_output_shape in func.tags,
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


class Sizes:
    """How many bytes overloads will make; see [Note: results of unknown size]."""

    def __init__(self) -> None:
        self._found: dict[_Key, int | None] = {}

    def of(
        self, func: Any, effects: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int | None:
        """Return the bytes that this call will make, None where that cannot be told."""
        if not effects.makes:
            return 0
        if effects.dynamic or func is torch.ops.aten.index.Tensor:
            most = _most(func, args)
            if most is not None:
                return most
        key = _key(func, args, kwargs)
        try:
            known = self._found.get(key, -1)
        except TypeError:  # an argument that cannot be compared
            return _asked(func, args, kwargs)
        if known == -1:
            if len(self._found) >= _MOST_SHAPES:
                self._found.clear()
            known = self._found[key] = _asked(func, args, kwargs)
            if known is None:
                known = self._found[key] = _asked(func, args, kwargs, torch.bfloat16)
        return known

    def learn(
        self,
        func: Any,
        effects: Effects,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        nbytes: int,
    ) -> None:
        """A call of unknown size has made so much."""
        if not effects.dynamic:
            with contextlib.suppress(TypeError):
                self._found[_key(func, args, kwargs)] = nbytes


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Key:
    return (func, _described(args), _described(tuple(kwargs.items())))


def _described(values: tuple[Any, ...]) -> _Key:
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append((value.dtype, value.size(), value.stride()))
        elif isinstance(value, list | tuple):
            found.append(_described(tuple(value)))
        else:
            found.append((type(value), value))
    return tuple(found)


def _asked(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], instead: torch.dtype | None = None
) -> int | None:
    """Return what the meta kernel says, None if there is none.

    Args:
        func: the overload.
        args: what it is called with.
        kwargs: by name.
        instead: the dtype to ask for in place of other floating ones.
    """
    given: set[int] = set()
    wider = 1

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor, tensor.device.type):
            raise TypeError
        nonlocal wider
        dtype = tensor.dtype
        if instead is not None and dtype.is_floating_point:
            wider, dtype = max(wider, dtype.itemsize // instead.itemsize), instead
        twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
        given.add(twin.untyped_storage()._cdata)
        return twin

    def settled(name: str, value: Any) -> Any:
        if name == "device" or isinstance(value, torch.device):
            return torch.device("meta")
        return None if isinstance(value, torch.Generator) else value

    try:
        with torch.no_grad():
            args = replaced(args, meta, torch.Tensor)
            kwargs = replaced(kwargs, meta, torch.Tensor)
            made = func(*args, **{name: settled(name, value) for name, value in kwargs.items()})
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors_of(made)}
    except Exception:
        return None
    return wider * sum(one.nbytes() for address, one in storages.items() if address not in given)


def _most(func: Any, args: tuple[Any, ...]) -> int | None:
    """Return the most bytes of a result whose shape depends on values, None if it does not, or
    nobody knows."""
    aten = torch.ops.aten
    first = args[0]
    if func is aten.nonzero.default:
        return int(first.numel() * max(1, first.dim()) * 8)
    if func is aten.masked_select.default:
        return int(first.numel() * first.element_size())
    if func is aten.index.Tensor:
        return _most_of_index(first, args[1])
    if func.overloadpacket in (aten._unique2, aten.unique_dim, aten.unique_consecutive):
        return int(first.numel() * (first.element_size() + 16))
    return None


def _most_of_index(tensor: torch.Tensor, indices: Any) -> int | None:
    """Return the most bytes of ``tensor[indices]`` if one of them is a mask."""
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return None
    taken = 1  # dimensions of the tensor that the indices take, and elements that they give
    count = 0
    for index in indices:
        if index is None:
            continue
        mask = index.dtype in (torch.bool, torch.uint8)
        count = max(count, index.numel())
        taken *= index.numel() if mask else tensor.size(_dimension(indices, index))
    rest = tensor.numel() // max(1, taken)
    return int(count * rest * tensor.element_size())


def _dimension(indices: Any, wanted: torch.Tensor) -> int:
    """Return the dimension of the tensor that ``wanted`` indexes."""
    dimension = 0
    for index in indices:
        if index is wanted:
            break
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        dimension += index.dim() if masks else 1
    return dimension
