"""Hides dynoffload's own operators from user modes and profilers.

Tensors are packed, moved and adopted inside the user's forward, backward and step. The user's
dispatch and function modes, such as that of `torch.utils.flop_counter.FlopCounterMode`, and torch's
profiler see only the operators of the training loop.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_record = torch._C._autograd._enable_record_function
_profiled = torch._C._autograd._profiler_enabled
_count_dispatching = torch._C._len_torch_dispatch_stack
_count_functions = torch._C._len_torch_function_stack


class _OfThread(threading.local):
    unrecorded = 0  # nesting depth of `_unrecorded`


_of_thread = _OfThread()


def is_watched() -> bool:
    """Return whether a user mode or profiler sees the operators of this thread. A default device on
    the CPU does not count."""
    functions = _count_functions()
    if _profiled() or _count_dispatching():
        return True
    return functions > 0 and not all(
        isinstance(mode, DeviceContext) and mode.device.type == "cpu"
        for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    _record(False)
    _of_thread.unrecorded += 1
    try:
        yield
    finally:
        _of_thread.unrecorded -= 1
        _record(not _of_thread.unrecorded)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide what this thread does from user modes and profilers."""
    with contextlib.ExitStack() as undo:
        if _count_dispatching():
            undo.enter_context(_disable_current_modes())
        if _count_functions():
            undo.enter_context(torch._C.DisableTorchFunction())
        if _profiled():
            undo.enter_context(_unrecorded())
        yield


def unseen(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Hide what ``function`` does from user modes and profilers."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not is_watched():
            return function(*args, **kwargs)
        with hidden():
            return function(*args, **kwargs)

    return call
