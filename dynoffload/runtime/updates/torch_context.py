"""The settings of torch under which an update is made, though it is made later or elsewhere.

An update that waits runs inside whatever reads the parameter next, maybe on another thread. It is
made with the settings of its ``step()``, and what is on around it (inference mode, `torch.func`
transformations, function and dispatch modes, a compiler) must not see it.

[Note: what cannot wait]  The default dtype, deterministic algorithms, oneDNN and autocast may be
switched between a step and the access that makes its updates, and other threads may be at work
then. So updates that depend on any of them are made in ``step()``: first ones, which make counts of
steps; those of ASGD, which makes tensors of its rates; and those of Adafactor and Muon, which
multiply matrices. A mode or a profiler of the user's that watches operators would miss an update
that waits, and no other thread flushes denormals alike.

[Note: settings of the process]  The flag of a compiler and the number of threads that new threads
begin with are the process's; all else is a thread's own. The guard's thread leaves them as they
are. Autocast is switched off by its flag alone: leaving a block of `torch.autocast` takes a lock
that the thread may hold which casts the very weight.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import ASGD, SGD, Adafactor, Muon, Optimizer

from dynoffload.runtime.unseen import hidden, is_watched

_LEAST = 5e-324  # the least denormal number
_here = threading.local()


def flushes_denormals() -> bool:
    """Return whether this thread takes denormal numbers for zero."""
    return _LEAST * 1.0 == 0.0


def may_wait(optimizer: Optimizer, *, first: bool = False) -> bool:
    """Return whether updates of this moment, or a parameter's ``first``, have the same bits later;
    see [Note: what cannot wait]."""
    if isinstance(optimizer, ASGD | Adafactor | Muon):
        return False
    if first and not isinstance(optimizer, SGD):
        return False
    return not (flushes_denormals() or is_watched())


@contextlib.contextmanager
def as_of_step(threads: int, kind: str, *, guard: bool = False) -> Iterator[None]:
    """Have the settings of a step, and nothing of the code around.

    Args:
        threads: of one operator, as of the step.
        kind: type of the device on which updates are made.
        guard: this is the guard's thread; see [Note: settings of the process].
    """
    with contextlib.ExitStack() as undo:
        now = torch.get_num_threads()
        if now != threads:
            of_new = _in_a_thread(torch.get_num_threads) if guard else threads
            if not guard:
                undo.callback(torch.set_num_threads, now)
            torch.set_num_threads(threads)
            if of_new != threads:
                _in_a_thread(torch.set_num_threads, of_new)
        if torch.is_autocast_enabled(kind):
            undo.callback(torch.set_autocast_enabled, kind, True)
            torch.set_autocast_enabled(kind, False)
        if flushes_denormals():
            undo.callback(torch.set_flush_denormal, True)
            torch.set_flush_denormal(False)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            undo.enter_context(temporarily_clear_interpreter_stack())
        undo.enter_context(hidden())
        if torch.is_inference_mode_enabled():
            undo.enter_context(torch.inference_mode(False))
        if torch.compiler.is_compiling():
            undo.enter_context(_not_compiling_here())
        yield


def _in_a_thread(call: Callable[..., Any], *args: Any) -> Any:
    """Return what ``call`` returns in a thread of its own."""
    with ThreadPoolExecutor(1, "dynoffload-threads") as pool:
        return pool.submit(call, *args).result()


class _Elsewhere:
    """The flag of a compiler that is at work: true but for a thread that makes an update."""

    def __bool__(self) -> bool:
        return not getattr(_here, "hidden", False)


_ELSEWHERE = _Elsewhere()


@contextlib.contextmanager
def _not_compiling_here() -> Iterator[None]:
    """Have `torch.compiler.is_compiling()` false in this thread, and as it is in others.

    The compiler itself ends what it has begun: nothing is put back.
    """
    settings = vars(torch.compiler)
    if settings["_is_compiling_flag"]:  # calls nothing until it is set: no other thread comes in
        settings["_is_compiling_flag"] = _ELSEWHERE
    _here.hidden = True
    try:
        yield
    finally:
        _here.hidden = False
