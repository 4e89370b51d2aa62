"""Residency before use: what an operator touches is on the accelerator before it is given to it.

What it is: the dispatch mode by which a device that serves no accesses of its own
(`Device.serves`) hears of every operator below autograd and autocast, forward, backward and in
between, and of what it reads and writes. What it is not: prefetch, which hooks announce; what is
here already costs a look. It is also the guard: nothing that torch dispatches can touch an absent
tensor.

[Note: views]  A view touches no byte, but most are refused of a storage that is empty. Those that
are not refused leave an absent region absent.

[Note: lists]  `torch._foreach_*`, and what unscales gradients, treat each tensor of a list by
itself, so lists that do not fit
together are given part by part, with the same results. Fused optimizers are given one parameter's
tensors at a time by whoever splits steps.

[Note: not dispatched]  What takes a tensor's address past the dispatcher sees an empty storage:
kernels of the user's that are launched with `data_ptr()`, and numpy. Storages that Python code
takes, as to copy or to save them, bring themselves (`RegionStorage`). In compiled code operators
are not dispatched one by one; torch leaves functions alone that it meets inside a dispatch mode, so
that a compiled model runs as it was written.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.runtime.counting import parts_of
from dynoffload.runtime.recompute.operators import effects_of

logger = logging.getLogger(__name__)

_aten = torch.ops.aten
_functorch = torch._C._functorch
_OF_EMPTY = {
    _aten.view.default,
    _aten.view.dtype,
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.detach.default,
}
"""Views that torch makes of empty storages, too."""


@functools.cache
def _is_over_lists(func: Any) -> bool:
    name = func._schema.name.rpartition("::")[2]
    return bool(name.startswith(("_foreach_", "_amp_foreach_")))


class Residency(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Brings what operators touch.

    Args:
        device: whose regions they touch.
    """

    is_of_residency = True

    def __init__(self, device: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._process = os.getpid()
        self._ended = False

    def end(self) -> None:
        """Do nothing any more, where another mode is in the way of leaving."""
        self._ended = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if self._ended or os.getpid() != self._process:  # a loader's worker is a copy of this
            return func(*args, **kwargs)
        touched = self._touched(args, kwargs)
        if not touched or func in _OF_EMPTY:
            return func(*args, **kwargs)
        if _is_over_lists(func) and not self._fit(touched):
            return self._in_parts(func, args, kwargs)
        return self._run(func, args, kwargs, touched)

    def _run(self, func: Any, args: Any, kwargs: Any, touched: Sequence[int]) -> Any:
        written: list[int] = []
        for name, place in effects_of(func).written:
            given = args[place] if place < len(args) else kwargs.get(name)
            written += self._touched((given,), {})
        self._device.use(touched, written)
        try:
            return func(*args, **kwargs)
        finally:
            self._device.used(touched)

    def _touched(self, args: Any, kwargs: Any) -> list[int]:
        """Return the regions that arguments lie in, each once."""
        owner = self._device.owner
        found: dict[int, None] = {}
        for held in _held_by((args, kwargs) if kwargs else args):
            region = owner(held)
            if region >= 0:
                found[region] = None
        return list(found)

    def _fit(self, regions: Sequence[int]) -> bool:
        return sum(map(self._device.size, regions)) <= self._device.capacity // 2

    def _in_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator over lists; see [Note: lists]."""
        count = max(len(one) for one in args if _is_list_of_tensors(one))
        results: list[Any] = []
        begin = 0
        while begin < count:
            end = begin + 1
            while end < count and self._fit(self._touched(_part(args, count, begin, end + 1), {})):
                end += 1
            part = _part(args, count, begin, end)
            more = {key: _part((one,), count, begin, end)[0] for key, one in kwargs.items()}
            made = self._run(func, part, more, self._touched(part, more))
            if made is not None:
                results += made
            begin = end
        return results or None


class Residence:
    """The threads in which operators are heard of, as dispatch modes are a thread's own: that which
    makes it, and those that say `here`.

    Args:
        device: whose regions operators touch.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._of_thread = threading.local()
        self._modes: list[Residency] = []
        self.here()

    def here(self) -> None:
        """Hear of the operators of this thread from now on."""
        if getattr(self._of_thread, "mode", None) is None:
            mode = self._of_thread.mode = Residency(self._device)
            self._modes.append(mode)
            mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Hear of none any more."""
        mine: Residency | None = getattr(self._of_thread, "mode", None)
        for mode in self._modes:
            mode.end()
        if mine is not None and _get_current_dispatch_mode() is mine:
            mine.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        elif mine is not None:
            logger.warning(
                "a dispatch mode was entered inside the offload() block and is still on: leave it "
                "before the block ends"
            )


def _held_by(values: Any) -> Iterator[torch.Tensor | torch.UntypedStorage]:
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
            yield from _held_by(value)


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value)


def _part(args: Sequence[Any], count: int, begin: int, end: int) -> tuple[Any, ...]:
    """Return arguments with their lists of ``count`` cut to those from ``begin`` to ``end``."""
    return tuple(
        one[begin:end] if isinstance(one, list | tuple) and len(one) == count else one
        for one in args
    )
