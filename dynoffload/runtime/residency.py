"""The dispatch guard: fetches what an operator touches to the accelerator before the operator runs.

For a device that serves no accesses (`Device.serves`), a `TorchDispatchMode` intercepts every
operator below autograd and autocast. A view of an absent region leaves it absent. Tensors over rows
are replaced by others: see `dynoffload.runtime.over_rows`.

[Note: lists]  `torch._foreach_*`, and the operator that unscales gradients, treat each tensor of a
list separately. Lists that do not fit together are processed in parts, with the same results.

[Note: out of memory]  If an operator has no memory for its results, regions are evicted and it is
called once more. Not retried are operators that write their arguments, as it is unknown how far
they got, and operators that draw random numbers.

[Note: not dispatched]  Code that takes a tensor's address past the dispatcher sees an empty
storage: user kernels launched with `data_ptr()`, and numpy. Storages that Python code accesses, to
copy or save them, fetch their regions (`RegionStorage`). Torch compiles no function that it meets
inside a dispatch mode, so a compiled model runs eagerly.
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
    """Return whether an operator that failed half way can be called again; see
    [Note: out of memory]."""
    effects = effects_of(func)
    return effects.known and not effects.written and not effects.draws


@dataclass
class _Life:
    """Whether a session has ended."""

    ended: bool = False


class Residency(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fetches what operators touch, until ``life`` has ended. It may stay on for longer: another
    mode may prevent its exit, or a thread may enter it as the session ends."""

    is_of_residency = True

    def __init__(self, device: Accelerator, life: _Life) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._life = device, life
        self._use = unseen(device.use)
        self._over_rows = OverRows(device, self)
        self._process = os.getpid()

    @property
    def ended(self) -> bool:
        """Whether the session has ended."""
        return self._life.ended

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if self._life.ended or os.getpid() != self._process:  # a data loader's worker is forked
            return call_below(func, args, kwargs)
        refuse_by_mode(func, args)
        with counting_writes(func, args, kwargs):
            try:
                return self._call(func, args, kwargs)
            except torch.OutOfMemoryError:
                if not _may_be_called_again(func) or not self._free_memory():
                    raise
            return self._call(func, args, kwargs)

    @uninterrupted
    def _free_memory(self) -> bool:
        return self._device.make_way()

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        touched = self._touched(args, kwargs)
        if not touched or func in OF_EMPTY:
            return call_below(func, args, kwargs)
        hold()  # defer signals, which could leave regions pinned
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


def _leave_ended() -> None:
    """Exit this thread's topmost modes whose sessions have ended. Such a mode is not on top if a
    session nested in its own still runs."""
    while isinstance(mode := _get_current_dispatch_mode(), Residency) and mode.ended:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _above(mode: TorchDispatchMode) -> list[TorchDispatchMode]:
    """Return the modes that this thread entered after ``mode``."""
    stack = _get_current_dispatch_mode_stack()
    return stack[stack.index(mode) + 1 :] if mode in stack else []


class _Leaving:
    """Exits a mode at thread exit: thread-local objects are destroyed while Python can still run in
    their thread."""

    def __init__(self, mode: Residency) -> None:
        self._mode = mode

    def __del__(self) -> None:
        if _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class Residence:
    """The threads whose operators are intercepted, as dispatch modes are per thread. These are the
    creating thread, those that call `here`, and those that Python starts meanwhile.

    [Note: other threads]  A thread that existed before, and has not called the model or the
    optimizer since, is not intercepted: touching an absent tensor there ends the process.

    [Note: guards]  Leaving `torch.inference_mode` restores the thread's dispatch keys as they were
    when it was entered, whatever modes were entered or left meanwhile. A mode entered inside is
    then on the stack but never called. A mode left inside is called but not on the stack, so every
    operator raises. So modes are entered and left here outside any such guard. Within a guard of
    the user, the next `here` restores the keys.
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
        """Intercept operators of a new thread: Python calls this once there, to profile it."""
        sys.setprofile(self._profile)
        if not self._life.ended:  # a nested session may have set this function again
            self.here()

    def here(self) -> None:
        """Intercept operators of this thread from now on; see [Note: guards]."""
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
        """Return ``meet`` with its operators intercepted. It is called during an operator, while
        torch has the mode off."""

        def call(region: int) -> None:
            # An autograd thread has the modes of the thread that called backward, none of its own.
            mode: Residency = getattr(self._of_thread, "mode", self._modes[0])
            if mode in _get_current_dispatch_mode_stack():
                meet(region)
                return
            with mode:
                meet(region)

        return call

    def stop(self) -> None:
        """Stop intercepting operators; `end` must still be called, outside of guards."""
        if threading.getprofile() == self._begin_thread:
            threading.setprofile(self._profile)
        self._life.ended = True

    def end(self) -> None:
        """Stop intercepting operators, and exit this thread's mode; see [Note: guards]."""
        self.stop()
        mine: Residency | None = getattr(self._of_thread, "mode", None)
        _leave_ended()
        above = [] if mine is None else _above(mine)
        if not all(isinstance(mode, Residency) for mode in above):  # else it exits after them
            logger.warning(
                "a dispatch mode was entered inside the offload() block and is still on: leave it "
                "before the block ends"
            )
