"""Runs operators on tensors over rows. A row's storage has no memory, so stand-ins replace it.

A tensor within one slice is replaced by one in that slice's region, so only what an expert's code
touches is fetched. Tensors over several slices are processed slice by slice where that gives the
same bits (`slice_cuts`). Else the slices are gathered in memory that counts as regions do, and
copied back where the operator wrote. Results hold no stand-ins: a returned argument is the tensor
that was given, and a result that shares a stand-in's memory becomes a view of the row.

[Note: composite operators]  Torch decomposes composite operators before guards are called,
except in inference mode. They are decomposed here then: some may return a view or a copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from dynoffload.below_modes import noting_views
from dynoffload.errors import BackendError
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.guarded import Handler
from dynoffload.memory.accelerator.rows import NOBODYS, Row, bytes_of
from dynoffload.runtime.counting import parts_of
from dynoffload.runtime.operators import (
    held_by,
    in_parts,
    is_list_of_tensors,
    replaced,
    tensors_of,
    unwrapped,
    written_by,
)
from dynoffload.runtime.slice_cuts import (
    KEEPING_ZEROS,
    ZEROING,
    Cut,
    Over,
    cut_of,
    is_by_element,
    is_over_lists,
)

_aten = torch.ops.aten
OF_EMPTY = {
    _aten.view.default,
    _aten.view.dtype,
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.detach.default,
}
"""Views that torch can also make of empty storages."""

_CHANGES_STORAGE = {"set_", "resize_", "resize_as_"}


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether an operator is composed of others."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


@functools.cache
def _touches_no_byte(func: Any) -> bool:
    """Return whether an operator makes views, changes a tensor's storage, or uses only shape, dtype
    and device."""
    name = func._schema.name.rpartition("::")[2]
    if func.is_view or func in OF_EMPTY or name in _CHANGES_STORAGE:
        return True
    return bool(name.endswith("_like") or name.startswith("new_"))


_Place = tuple[torch.UntypedStorage, int]
"""A storage that replaces slices, and the byte of their row at which it begins."""


class OverRows:
    """Runs operators that have arguments over rows.

    Args:
        device: the rows' device.
        again: runs an operator on parts of its arguments.
        below: runs one that finds what it touches.
    """

    def __init__(self, device: Accelerator, again: Handler, below: Handler) -> None:
        self._device, self._again, self._below = device, again, below

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator with arguments over rows.

        Raises:
            BudgetError: it needs several slices at once, and they do not fit.
            BackendError: it makes a sparse tensor over several slices.
            SpillError: the file cannot be read or written.
        """
        if is_composite(func):
            with noting_views(func):
                return func.decompose(*args, **kwargs)
        if _touches_no_byte(func):
            return self._below(func, args, kwargs)
        if is_over_lists(func):
            return self._call_over_lists(func, args, kwargs)
        over = self._over(args, kwargs)
        if any(len(one.slices) > 1 for one in over):
            tensors = list(tensors_of((args, kwargs)))
            lists = any(is_list_of_tensors(one) for one in (*args, *kwargs.values()))
            written = list(tensors_of(written_by(func, args, kwargs)))
            cut = None if lists else cut_of(func, tensors, over, written)
            if cut is not None:
                return self._by_slices(func, args, kwargs, cut)
        return self._run(func, args, kwargs, over)

    def _over(self, args: Any, kwargs: Any) -> list[Over]:
        """Return the arguments over rows, each once."""
        found: dict[int, Over] = {}
        for given in tensors_of((args, kwargs)):
            plain = unwrapped(given)
            if plain.layout is torch.strided:
                number = self._device.lookup(plain)
                if number < NOBODYS:
                    row = self._device.row(number)
                    found[id(given)] = Over(given, plain, row, row.under(plain))
        return list(found.values())

    # On stand-ins

    def _run(self, func: Any, args: Any, kwargs: Any, over: Sequence[Over]) -> Any:
        """Run an operator on stand-ins for ``over``."""
        wide = _wide(over)
        alone = {
            one: one.row.regions[one.slices.start]
            for one in over
            if one.slices and one.slices.start not in wide.get(one.row, ())
        }
        written = list(tensors_of(written_by(func, args, kwargs)))
        into = [one for one in over if any(one.given is other for other in written)]
        lookup = self._device.lookup
        touched = dict.fromkeys([*map(lookup, held_by((args, kwargs))), *alone.values()])
        changed = [*map(lookup, held_by(written)), *(alone[one] for one in into if one in alone)]
        with contextlib.ExitStack() as ends:
            gathered: dict[Row, _Place] = {
                row: (
                    ends.enter_context(self._gathered(func, row, slices)),
                    slices.start * row.slice_bytes,
                )
                for row, slices in wide.items()
            }
            used = [region for region in touched if region > NOBODYS]
            self._device.use(used, [region for region in changed if region > NOBODYS])
            try:
                places = {
                    one: (self._device.storage(alone[one]), one.slices.start * one.row.slice_bytes)
                    if one in alone
                    else gathered.get(one.row)
                    for one in over
                }
                result = self._on_stand_ins(func, args, kwargs, places)
            finally:
                self._device.used(used)
            for one in into:
                if one not in alone and one.slices:
                    self._copy_back(one, *gathered[one.row])
        return result

    def _on_stand_ins(
        self, func: Any, args: Any, kwargs: Any, places: dict[Over, _Place | None]
    ) -> Any:
        stand_ins = {id(one.given): _stand_in(one, place) for one, place in places.items()}
        mine = {id(other): one for other, one in zip(stand_ins.values(), places, strict=True)}
        rows = {p[0]._cdata: (one.row, p[1]) for one, p in places.items() if p is not None}

        def given(tensor: torch.Tensor) -> torch.Tensor:
            return stand_ins.get(id(tensor), tensor)

        def returned(tensor: torch.Tensor) -> torch.Tensor:
            one = mine.get(id(tensor))
            if one is not None:
                if tensor.shape != one.plain.shape:  # ``out=`` was resized
                    one.plain.resize_(tensor.shape)
                return one.given
            if tensor.layout is not torch.strided:
                self._check_parts(func, tensor, rows)
                return tensor
            if tensor.untyped_storage()._cdata not in rows:
                return tensor
            row, start = rows[tensor.untyped_storage()._cdata]
            return _moved(tensor, row.storage, start)

        args = replaced(args, given, torch.Tensor)
        kwargs = replaced(kwargs, given, torch.Tensor)
        return replaced(self._below(func, args, kwargs), returned, torch.Tensor)

    def _check_parts(self, func: Any, made: torch.Tensor, rows: Container[int]) -> None:
        """Refuse a sparse tensor that uses gathered memory, as it would outlive that.

        Raises:
            BackendError: it is.
        """
        for part in parts_of(made):
            cdata = part.untyped_storage()._cdata
            if cdata in rows and self._device.lookup(part) == NOBODYS:
                raise BackendError(
                    f"{func} makes a tensor of layout {made.layout} over several slices of a "
                    "parameter that is paged by slices: clone() what it is made of first"
                )

    @contextlib.contextmanager
    def _gathered(self, func: Any, row: Row, slices: range) -> Iterator[torch.UntypedStorage]:
        """Yield a storage with the contents of several slices."""
        names, first = self._device.names, row.regions[0]
        name = names.get(first, f"the row of region {first}").replace("[0]", "", 1)
        what = f"{func} on {len(slices)} slices of {name}"
        with self._device.scratch(len(slices) * row.slice_bytes, what) as storage:
            for place, number in enumerate(slices):
                self._exchange(row, number, storage, place, out=True)
            yield storage

    def _copy_back(self, one: Over, storage: torch.UntypedStorage, start: int) -> None:
        """Copy what an operator wrote in gathered memory back to the slices."""
        for number in one.slices:
            place = number - start // one.row.slice_bytes
            self._exchange(one.row, number, storage, place, out=False)

    def _exchange(
        self, row: Row, number: int, storage: torch.UntypedStorage, place: int, *, out: bool
    ) -> None:
        """Copy a slice into gathered memory, or back."""
        region, nbytes = row.regions[number], row.slice_bytes
        theirs = bytes_of(storage, place * nbytes, nbytes)
        self._device.meet_owner([region])
        if out and self._device.is_clear([region])[0]:
            theirs.zero_()
            return
        self._device.use([region], [] if out else [region])
        try:
            ours = bytes_of(self._device.storage(region), 0, nbytes)
            (theirs if out else ours).copy_(ours if out else theirs)
        finally:
            self._device.used([region])

    # Slice by slice

    def _by_slices(self, func: Any, args: Any, kwargs: Any, cut: Cut) -> Any:
        written = list(tensors_of(written_by(func, args, kwargs)))
        stays = self._stay_clear(func, args)
        whole: torch.Tensor | None = None
        for number in range(cut.pieces):
            piece = functools.partial(cut.piece, number=number)
            if written and self._settles(func, piece(written[0]), stays):
                continue
            made = self._again(
                func,
                replaced(args, piece, torch.Tensor),
                replaced(kwargs, piece, torch.Tensor),
            )
            if not written:
                if whole is None:
                    shape = (cut.shape[0], *made.shape[1:])
                    whole = torch.empty(shape, dtype=made.dtype, device=made.device)
                whole.narrow(0, number * cut.length, cut.length).copy_(made)
        return written[0] if written else whole

    def _settles(self, func: Any, piece: torch.Tensor, stays: Callable[[], bool]) -> bool:
        """Return whether a written piece of a row needs no operator: it keeps its value, or was
        cleared without moving bytes."""
        one = next(iter(self._over([piece], {})), None)
        if one is None or len(one.slices) != 1 or piece.nbytes != one.row.slice_bytes:
            return False
        region = one.row.regions[one.slices.start]
        self._device.meet_owner([region])
        if func in ZEROING:
            self._device.clear([region])
            return True
        return func in KEEPING_ZEROS and self._device.is_clear([region])[0] and stays()

    def _stay_clear(self, func: Any, args: Any) -> Callable[[], bool]:
        """Return a predicate: whether +0 stays +0. It reads the factor only when it is called."""

        @functools.cache
        def stays() -> bool:
            place, keeps = KEEPING_ZEROS[func]
            factor = args[place]
            if isinstance(factor, torch.Tensor):
                if factor.numel() != 1 or self._device.lookup(unwrapped(factor)) != NOBODYS:
                    return False
                factor = factor.item()
            return isinstance(factor, int | float) and keeps(factor)

        return stays

    # Over lists

    def _call_over_lists(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_by_element(func):
            args = self._in_slices(func, args)
            if not args[0]:
                return None
        return in_parts(
            args,
            kwargs,
            self._fit,
            lambda part, more: self._run(func, part, more, self._over(part, more)),
        )

    def _fit(self, args: tuple[Any, ...]) -> bool:
        lookup = self._device.lookup
        regions = {lookup(held) for held in held_by(args)}
        need = 0
        for one in self._over(args, {}):
            if len(one.slices) == 1:
                regions.add(one.row.regions[one.slices.start])
            else:
                need += len(one.slices) * one.row.slice_bytes
        need += sum(self._device.size(region) for region in regions if region > NOBODYS)
        return need <= self._device.capacity // 2

    def _in_slices(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments whose lists hold the slices of each tensor that can be cut, in its
        place. Slices that need no operator are left out."""
        count = len(args[0])
        lists = [n for n, one in enumerate(args) if isinstance(one, list | tuple)]
        lists = [n for n in lists if len(args[n]) == count]
        made: dict[int, list[Any]] = {n: [] for n in lists}
        stays = self._stay_clear(func, args)
        for place in range(count):
            values = {n: args[n][place] for n in lists}
            tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
            cut = cut_of(func, tensors, self._over(tensors, {}), [values[0]])
            for number in range(cut.pieces if cut else 1):
                piece = {n: cut.piece(v, number) if cut else v for n, v in values.items()}
                if not self._settles(func, piece[0], stays):
                    for n in lists:
                        made[n].append(piece[n])
        return tuple(made.get(n, one) for n, one in enumerate(args))


def _wide(over: Sequence[Over]) -> dict[Row, range]:
    """Return the rows of which some tensor spans several slices, each with the range from the first
    such slice to the last."""
    found: dict[Row, range] = {}
    for one in over:
        if len(one.slices) > 1:
            known = found.get(one.row, one.slices)
            start, stop = min(known.start, one.slices.start), max(known.stop, one.slices.stop)
            found[one.row] = range(start, stop)
    return found


def _stand_in(one: Over, place: _Place | None) -> torch.Tensor:
    """Return the stand-in for a tensor over a row."""
    plain = one.plain
    with torch._C._DisableTorchDispatch():
        if place is None or not one.slices:  # it has no elements
            return torch.empty_strided(
                plain.size(), plain.stride(), dtype=plain.dtype, device=plain.device
            )
    storage, start = place
    return _moved(plain, storage, -start)


def _moved(tensor: torch.Tensor, storage: torch.UntypedStorage, by: int) -> torch.Tensor:
    """Return a tensor like ``tensor`` in ``storage``, with its offset moved by ``by`` bytes."""
    with torch._C._DisableTorchDispatch():
        offset = tensor.storage_offset() + by // tensor.element_size()
        made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        made.set_(storage, offset, tensor.size(), tensor.stride())
        if tensor.is_conj():
            made = torch._conj(made)
        return torch._neg_view(made) if tensor.is_neg() else made
