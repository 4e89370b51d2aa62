"""Snapshots torch's settings at ``step()`` and restores them for a deferred update.

A deferred update runs inside the code that reads the parameter next, possibly on another thread. It
uses the settings of its ``step()``. It is hidden from what is active there: inference mode,
`torch.func` transformations, function and dispatch modes, a compiler.

[Note: settings of the process]  The default dtype, deterministic algorithms, oneDNN, the compiler's
flag and the initial thread count of new threads are global; all else is thread-local. The guard's
thread makes updates while user threads run, so it leaves the global settings unchanged. On the CPU
no optimizer of `torch.optim` depends on deterministic algorithms. Where the guard's thread makes
updates, those that depend on the default dtype are not deferred (`depends_on_dtype`). Those that
multiply matrices are refused there if oneDNN was switched meanwhile.

[Note: what cannot wait]  A user mode or profiler that watches operators would miss a deferred
update. Other threads do not flush denormals in the same way. Updates that autocast changes are also
made in ``step()``. All others are made with autocast off, by its flag alone: leaving a block of
`torch.autocast` takes a lock, which the thread that casts this weight may hold.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import ASGD, SGD, Muon, Optimizer

from dynoffload.errors import ConfigError
from dynoffload.runtime.unseen import hidden, is_watched

_LEAST = 5e-324  # the least denormal number
_CAST = ("Adafactor", "Muon")
"""The only optimizers with operators that autocast casts and oneDNN computes."""
_here = threading.local()


def flushes_denormals() -> bool:
    """Return whether this thread flushes denormal numbers to zero."""
    return _LEAST * 1.0 == 0.0


def may_wait(optimizer: Optimizer, kind: str) -> bool:
    """Return whether an update on a device of type ``kind`` may be deferred under the current
    settings; see [Note: what cannot wait]."""
    cast = depends_on_autocast(optimizer) and torch.is_autocast_enabled(kind)
    return not (cast or flushes_denormals() or is_watched())


def depends_on_autocast(optimizer: Optimizer) -> bool:
    """Return whether an update has operators that autocast casts."""
    return type(optimizer).__name__ in _CAST


def depends_on_dtype(optimizer: Optimizer, *, first: bool) -> bool:
    """Return whether an update depends on the default dtype. The ``first`` one does, as it creates
    step counts; with ASGD every one does, as it creates tensors of its rates."""
    kind = type(optimizer)
    return kind is ASGD or (first and kind not in (SGD, Muon))


@dataclass(frozen=True, slots=True)
class TorchContext:
    """The torch settings that an update is made with.

    Attributes:
        dtype: the default dtype.
        deterministic: whether deterministic algorithms are requested.
        warn_only: whether missing deterministic algorithms only cause a warning.
        threads: number of threads within one operator.
        mkldnn: whether oneDNN may multiply matrices.
    """

    dtype: torch.dtype
    deterministic: bool
    warn_only: bool
    threads: int
    mkldnn: bool

    @classmethod
    def now(cls) -> TorchContext:
        """Return the current settings."""
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_num_threads(),
            torch._C._get_mkldnn_enabled(),
        )

    def check_behind(self, optimizer: Optimizer) -> None:
        """Refuse an update on the guard's thread that needs another global setting.

        Raises:
            ConfigError: oneDNN was switched on or off since ``step()``.
        """
        if depends_on_autocast(optimizer) and self.mkldnn != torch._C._get_mkldnn_enabled():
            raise ConfigError(
                f"oneDNN was switched {'off' if self.mkldnn else 'on'} between step() and an "
                f"access to a parameter, and {type(optimizer).__name__} multiplies matrices by it: "
                "call session.flush() before it is switched"
            )

    @contextlib.contextmanager
    def again(self, kind: str, *, guard: bool = False) -> Iterator[None]:
        """Restore these settings for a block, hidden from the surrounding modes.

        Args:
            kind: type of the device on which updates are made.
            guard: whether this is the guard's thread; see [Note: settings of the process].
        """
        with contextlib.ExitStack() as undo:
            if guard:
                self._set_threads_of_guard()
            elif (now := TorchContext.now()) != self:
                undo.callback(now._set)
                self._set()
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

    def _set(self) -> None:
        torch.set_default_dtype(self.dtype)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch._C._set_mkldnn_enabled(self.mkldnn)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def _set_threads_of_guard(self) -> None:
        """Set this thread's number of threads, but keep the initial one of new threads."""
        if torch.get_num_threads() != self.threads:
            of_new = _in_a_thread(torch.get_num_threads)
            torch.set_num_threads(self.threads)
            if of_new != self.threads:
                _in_a_thread(torch.set_num_threads, of_new)


def _in_a_thread(call: Callable[..., Any], *args: Any) -> Any:
    """Run ``call`` in a new thread and return its result."""
    with ThreadPoolExecutor(1, "dynoffload-threads") as pool:
        return pool.submit(call, *args).result()


class _Elsewhere:
    """An active compiler's flag: true except in a thread that makes an update."""

    def __bool__(self) -> bool:
        return not getattr(_here, "hidden", False)


_ELSEWHERE = _Elsewhere()


@contextlib.contextmanager
def _not_compiling_here() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` false in this thread, and leave it unchanged in others.

    The flag is not restored: the compiler itself resets it when it ends.
    """
    settings = vars(torch.compiler)
    if settings["_is_compiling_flag"]:  # no call until the flag is set, so no thread switch
        settings["_is_compiling_flag"] = _ELSEWHERE
    _here.hidden = True
    try:
        yield
    finally:
        _here.hidden = False
