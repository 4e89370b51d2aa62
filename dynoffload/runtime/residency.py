"""Fetches what an operator touches to the accelerator before the operator runs.

For a device that serves no accesses (`Device.serves`), tensors over regions are guarded
(`dynoffload.memory.accelerator.guarded`): torch calls `Residency` for every operator on them, in
any thread, below autograd and autocast. A view of an absent region leaves it absent. Tensors over
rows are replaced by others: see `dynoffload.runtime.over_rows`.

[Note: lists]  `torch._foreach_*`, and the operator that unscales gradients, treat each tensor of a
list separately. Lists that do not fit together are processed in parts, with the same results.

[Note: out of memory]  If such an operator has no memory for its results, regions are evicted and it
is called once more. Not retried are operators that write their arguments, as it is unknown how far
they got, and operators that draw random numbers.

[Note: not dispatched]  Code that takes a tensor's address past the dispatcher, as numpy does, sees
an empty storage. `data_ptr()` fetches the region, for kernels (`Accelerator.lend`). Storages that
Python code accesses, to copy or save them, fetch their regions (`RegionStorage`). Compiled code
takes addresses too: it runs as it was written, but for the modules of
`dynoffload.runtime.passes.compiled`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynoffload.below_modes import is_plain, refuse_by_mode
from dynoffload.memory.accelerator import guarded
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.rows import NOBODYS
from dynoffload.runtime.counting import parts_of
from dynoffload.runtime.interrupts import admit, hold, uninterrupted
from dynoffload.runtime.operators import (
    counting_writes,
    effects_of,
    held_by,
    in_parts,
    tensors_of,
    writes_lists,
    written_by,
)
from dynoffload.runtime.over_rows import OF_EMPTY, OverRows, is_composite
from dynoffload.runtime.slice_cuts import is_over_lists
from dynoffload.runtime.unseen import unseen

_NOTHING = contextlib.nullcontext()
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an operator is run.

    Attributes:
        func: the operator.
        empty: it may run on absent regions.
        alone: it may run on its arguments as they are; it is not over lists, and no composite one.
        plain: below a mode it is called, and chosen, as elsewhere.
        counts: torch does not count all of its writes.
        written: positions of the arguments that it writes.
    """

    func: Any
    empty: bool
    alone: bool
    plain: bool
    counts: bool
    written: tuple[int, ...]


_kinds: dict[int, _Kind] = {}  # by the operator's id, as its hash is slow


def _kind_of(func: Any) -> _Kind:
    known = _kinds.get(id(func))
    if known is None:
        effects, schema = effects_of(func), func._schema
        composite, lists = is_composite(func), any(map(_is_over_lists, schema.arguments))
        known = _kinds[id(func)] = _Kind(
            func,
            empty=func in OF_EMPTY,
            alone=effects.known and not composite and not lists,
            plain=is_plain(func),
            counts=writes_lists(func),
            written=tuple(place for _, place in effects.written),
        )
    return known


def _is_over_lists(argument: Any) -> bool:
    return str(argument.type).startswith(("List[Tensor", "List[Optional[Tensor"))


@functools.cache
def _may_be_called_again(func: Any) -> bool:
    """Return whether an operator that failed half way can be called again; see
    [Note: out of memory]."""
    effects = effects_of(func)
    return effects.known and not effects.written and not effects.draws


class Residency:
    """Fetches what operators on guarded tensors touch, until `end`."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._use = unseen(device.use)
        self._over_rows = OverRows(device, self.call, self._below)
        self._process = os.getpid()
        self._ended = False
        guarded.begin(self.call)

    def end(self) -> None:
        """Fetch nothing from now on."""
        self._ended = True
        guarded.end(self.call)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator with guarded arguments, and return its results, guarded where they are
        over regions.

        Raises:
            BudgetError: what it touches does not fit together.
            SpillError: the file cannot be read or written.
        """
        if self._ended or os.getpid() != self._process:  # a data loader's worker is forked
            return guarded.call_below(func, args, kwargs)
        kind = _kind_of(func)
        if not kind.plain or torch._C._current_autograd_node() is not None:
            refuse_by_mode(func, args)
        with counting_writes(func, args, kwargs) if kind.counts else _NOTHING:
            try:
                return self._call(kind, args, kwargs)
            except torch.OutOfMemoryError:
                if not _may_be_called_again(func) or not self._free_memory():
                    raise
            return self._call(kind, args, kwargs)

    @uninterrupted
    def _free_memory(self) -> bool:
        return self._device.make_way()

    def _call(self, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = kind.func
        if kind.alone and not kwargs:
            done, made = self._at_once(kind, args)
            if done:
                return self._fitted(made)
        hold()  # defer signals, which could leave regions pinned
        try:
            touched = self._touched(args, kwargs)
            if not touched or kind.empty:
                return self._fitted(self._below(func, args, kwargs))
            return self._fitted(self._call_on(touched, func, args, kwargs))
        finally:
            admit()

    def _below(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that finds what it touches of this session; others may follow."""
        others = guarded.handlers
        place = others.index(self.call) if len(others) > 1 and self.call in others else 0
        return (others[place - 1] if place else guarded.call_below)(func, args, kwargs)

    def _at_once(self, kind: _Kind, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Run an operator, if it needs nothing but regions that are there; see
        `Accelerator.at_once`."""
        regions, known = [], self._device.regions
        for one in args:
            if isinstance(one, torch.Tensor):
                if one.layout is not torch.strided or is_wrapped(one):
                    return False, None
                region = known.get(one.untyped_storage()._cdata)
                if region is not None:
                    regions.append(region)
                elif guarded.is_guarded(one):  # by another session
                    return False, None
        if not regions or min(regions) < NOBODYS:
            return False, None
        changed: Sequence[int] = ()
        if kind.written:
            written = [args[n] for n in kind.written if n < len(args)]
            changed = [self._device.lookup(one) for one in written if isinstance(one, torch.Tensor)]
        call = guarded.call_plain if kind.plain else guarded.call_below
        return self._device.at_once(regions, changed, lambda: call(kind.func, args, {}))

    def _fitted(self, made: Any) -> Any:
        if isinstance(made, torch.Tensor) and made.layout is torch.strided:
            return guarded.fit(made)
        for one in tensors_of(made):
            if one.layout is torch.strided:
                guarded.fit(one)
            elif any(guarded.is_paged(part.untyped_storage()) for part in parts_of(one)):
                guarded.guard(one)
        return made

    def _call_on(
        self, touched: Sequence[int], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if min(touched) < NOBODYS:
            return self._over_rows.call(func, args, kwargs)
        if is_over_lists(func) and not self._fit(touched):
            return in_parts(
                args,
                kwargs,
                lambda part: self._fit(self._touched(part, {})),
                lambda part, more: self._run(func, part, more, self._touched(part, more)),
            )
        return self._run(func, args, kwargs, touched)

    def _run(self, func: Any, args: Any, kwargs: Any, touched: Sequence[int]) -> Any:
        self._use(touched, self._touched(written_by(func, args, kwargs), {}))
        try:
            return self._below(func, args, kwargs)
        finally:
            self._device.used(touched)

    def _touched(self, args: Any, kwargs: Any) -> list[int]:
        """Return the regions of arguments, and the numbers of their rows, each once."""
        lookup = self._device.lookup
        found: dict[int, None] = {}
        for held in held_by((args, kwargs) if kwargs else args):
            region = lookup(held)
            if region != NOBODYS:
                found[region] = None
        return list(found)

    def _fit(self, regions: Sequence[int]) -> bool:
        return sum(map(self._device.size, regions)) <= self._device.capacity // 2
