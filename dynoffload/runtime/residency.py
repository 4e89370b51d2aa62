"""The dispatch guard: what an operator touches is on the accelerator before the operator runs.

A device that serves no accesses (`Device.serves`) hears by a dispatch mode of every operator below
autograd and autocast, and of what it reads and writes. A view of an absent region leaves it absent.
What lies over a row gets other tensors: `dynoffload.runtime.over_rows`.

[Note: lists]  `torch._foreach_*`, and what unscales gradients, treat each tensor of a list by
itself, so lists that do not fit together are given part by part, with the same results.

[Note: out of memory]  Where an operator finds no memory for what it makes, regions make way, and it
is called once more: unless it writes what it was given, of which nobody knows how far it has come,
or draws random numbers.

[Note: not dispatched]  What takes a tensor's address past the dispatcher sees an empty storage:
kernels of the user's that are launched with `data_ptr()`, and numpy. Storages that Python code
takes, as to copy or to save them, bring themselves (`RegionStorage`). Torch compiles no function
that it meets inside a dispatch mode, so a compiled model runs as it was written.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

from dynoffload.below_modes import call_below, refuse_by_mode
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.rows import NOBODYS
from dynoffload.runtime.interrupts import admit, hold, uninterrupted
from dynoffload.runtime.operators import counting_writes, effects_of, held_by, in_parts, written_by
from dynoffload.runtime.over_rows import OF_EMPTY, OverRows
from dynoffload.runtime.slice_cuts import is_over_lists
from dynoffload.runtime.unseen import unseen

logger = logging.getLogger(__name__)

_MODES_ARE_CALLED = ("Python", "PythonTLSSnapshot")
"""The dispatch keys that are on in a thread with dispatch modes."""


@functools.cache
def _may_be_called_again(func: Any) -> bool:
    """Return whether an operator that has failed half way can begin anew; see
    [Note: out of memory]."""
    effects = effects_of(func)
    return effects.known and not effects.written and not effects.draws


@dataclass
class _Life:
    """Whether a session has ended."""

    ended: bool = False


class Residency(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Brings what operators touch, until ``life`` has ended: another mode may be in the way of
    leaving, and a thread may enter this one as the session ends."""

    is_of_residency = True

    def __init__(self, device: Accelerator, life: _Life) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._life = device, life
        self._use = unseen(device.use)
        self._over_rows = OverRows(device, self)
        self._process = os.getpid()

    @property
    def ended(self) -> bool:
        """Whether the session has."""
        return self._life.ended

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if self._life.ended or os.getpid() != self._process:  # a loader's worker is a copy
            return call_below(func, args, kwargs)
        refuse_by_mode(func, args)
        with counting_writes(func, args, kwargs):
            try:
                return self._call(func, args, kwargs)
            except torch.OutOfMemoryError:
                if not _may_be_called_again(func) or not self._make_way():
                    raise
            return self._call(func, args, kwargs)

    @uninterrupted
    def _make_way(self) -> bool:
        return self._device.make_way()

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        touched = self._touched(args, kwargs)
        if not touched or func in OF_EMPTY:
            return call_below(func, args, kwargs)
        hold()  # what is held for an operator is let go of, and what enters has its bytes
        try:
            return self._call_on(touched, func, args, kwargs)
        finally:
            admit()

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
            return call_below(func, args, kwargs)
        finally:
            self._device.used(touched)

    def _touched(self, args: Any, kwargs: Any) -> list[int]:
        """Return the regions that arguments lie in, and the numbers of their rows, each once."""
        lookup = self._device.lookup
        found: dict[int, None] = {}
        for held in held_by((args, kwargs) if kwargs else args):
            region = lookup(held)
            if region != NOBODYS:
                found[region] = None
        return list(found)

    def _fit(self, regions: Sequence[int]) -> bool:
        return sum(map(self._device.size, regions)) <= self._device.capacity // 2


def _leave_ended() -> None:
    """Take off what is on top of this thread's modes and belongs to sessions that have ended: one
    that ended before another, which began within it, is on below."""
    while isinstance(mode := _get_current_dispatch_mode(), Residency) and mode.ended:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _above(mode: TorchDispatchMode) -> list[TorchDispatchMode]:
    """Return the modes that this thread entered after ``mode``."""
    stack = _get_current_dispatch_mode_stack()
    return stack[stack.index(mode) + 1 :] if mode in stack else []


class _Leaving:
    """Takes a mode off as its thread ends: what is of a thread dies in it, while Python still can
    run there."""

    def __init__(self, mode: Residency) -> None:
        self._mode = mode

    def __del__(self) -> None:
        if _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class Residence:
    """The threads in which operators are heard of, as dispatch modes are a thread's own: that which
    makes it, those that say `here`, and those that Python starts meanwhile.

    [Note: other threads]  Of a thread that was there before, and has not called the model or the
    optimizer since, nothing is heard: an absent tensor that it touches ends the process.

    [Note: guards]  Leaving `torch.inference_mode` restores the dispatch keys of the thread as they
    were when it was entered, whatever modes have come or gone meanwhile. A mode that was entered
    within is then on the stack and never called; one that was left within is called and not there,
    so that every operator raises. So no guard is on where modes are entered and left here. Under
    one of the user's, `here` puts the keys back the next time.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._of_thread = threading.local()
        self._modes: list[Residency] = []
        self._life = _Life()
        self.here()
        self._profile = threading.getprofile()
        threading.setprofile(self._begin_thread)

    def _begin_thread(self, frame: Any, event: str, arg: Any) -> None:
        """A thread has begun: Python calls this there once, as it is asked to profile it."""
        sys.setprofile(self._profile)
        if not self._life.ended:  # a session within this one may have put it back
            self.here()

    def here(self) -> None:
        """Hear of the operators of this thread from now on; see [Note: guards]."""
        mode: Residency | None = getattr(self._of_thread, "mode", None)
        if mode is None:
            mode = self._of_thread.mode = Residency(self._device, self._life)
            self._modes.append(mode)
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._of_thread.leaving = _Leaving(mode)
        elif mode in _get_current_dispatch_mode_stack():
            for key in _MODES_ARE_CALLED:
                torch._C._dispatch_tls_set_dispatch_key_included(key, True)

    def heard(self, meet: Callable[[int], None]) -> Callable[[int], None]:
        """Return what hears of the operators of ``meet``, too, which is called in the midst of one:
        torch has the mode off meanwhile."""

        def call(region: int) -> None:
            # A thread of autograd's has the modes of the thread that called backward, and no own.
            mode: Residency = getattr(self._of_thread, "mode", self._modes[0])
            if mode in _get_current_dispatch_mode_stack():
                meet(region)
                return
            with mode:
                meet(region)

        return call

    def stop(self) -> None:
        """Hear of none any more; `end` is still to be called, outside of guards."""
        if threading.getprofile() == self._begin_thread:
            threading.setprofile(self._profile)
        self._life.ended = True

    def end(self) -> None:
        """Hear of none any more, and leave this thread's mode; see [Note: guards]."""
        self.stop()
        mine: Residency | None = getattr(self._of_thread, "mode", None)
        _leave_ended()
        above = [] if mine is None else _above(mine)
        if not all(isinstance(mode, Residency) for mode in above):  # else it goes with them
            logger.warning(
                "a dispatch mode was entered inside the offload() block and is still on: leave it "
                "before the block ends"
            )
