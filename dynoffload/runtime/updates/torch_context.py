"""The settings of torch under which an update is made, though it is made later or elsewhere.

An update that waits runs inside whatever reads the parameter next, maybe on another thread. It is
made with the settings of its ``step()``, and what is on around it (inference mode, `torch.func`
transformations, function and dispatch modes, a compiler) must not see it.

[Note: settings of the process]  The default dtype, deterministic algorithms, oneDNN, the flag of a
compiler and the number of threads that new threads begin with are the process's; all else is a
thread's own. The guard's thread makes updates while threads of the user's run, so it leaves those
settings as they are. On the CPU no optimizer of `torch.optim` depends on deterministic algorithms.
Where it makes updates, what depends on the default dtype does not wait (`depends_on_dtype`), and
what multiplies matrices is refused there if oneDNN was switched meanwhile.

[Note: what cannot wait]  A mode or a profiler of the user's that watches operators would miss an
update that waits. No other thread flushes denormals alike. Updates that autocast changes are made
in ``step()``, too; all others are made with autocast off, by its flag alone: leaving a block of
`torch.autocast` takes a lock that the thread may hold which casts the very weight.
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
"""Whose operators autocast casts and oneDNN makes; those of the others they do not."""
_here = threading.local()


def flushes_denormals() -> bool:
    """Return whether this thread takes denormal numbers for zero."""
    return _LEAST * 1.0 == 0.0


def may_wait(optimizer: Optimizer, kind: str) -> bool:
    """Return whether updates of this moment, on a device of type ``kind``, may be made later; see
    [Note: what cannot wait]."""
    cast = type(optimizer).__name__ in _CAST and torch.is_autocast_enabled(kind)
    return not (cast or flushes_denormals() or is_watched())


def depends_on_dtype(optimizer: Optimizer, *, first: bool) -> bool:
    """Return whether an update depends on the default dtype: the first, which makes counts of
    steps, and each of ASGD, which makes tensors of its rates."""
    kind = type(optimizer)
    return kind is ASGD or (first and kind not in (SGD, Muon))


@dataclass(frozen=True, slots=True)
class TorchContext:
    """The settings that an update takes along.

    Attributes:
        dtype: the default dtype.
        deterministic: whether deterministic algorithms are asked for.
        warn_only: whether those that are missing are only warned of.
        threads: of one operator.
        mkldnn: whether oneDNN may multiply matrices.
    """

    dtype: torch.dtype
    deterministic: bool
    warn_only: bool
    threads: int
    mkldnn: bool

    @classmethod
    def now(cls) -> TorchContext:
        """Return the settings of this moment."""
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_num_threads(),
            torch._C._get_mkldnn_enabled(),
        )

    def check_behind(self, optimizer: Optimizer) -> None:
        """Refuse an update on the guard's thread that needs another setting of the process.

        Raises:
            ConfigError: oneDNN was switched on or off since ``step()``.
        """
        if type(optimizer).__name__ in _CAST and self.mkldnn != torch._C._get_mkldnn_enabled():
            raise ConfigError(
                f"oneDNN was switched {'off' if self.mkldnn else 'on'} between step() and an "
                f"access to a parameter, and {type(optimizer).__name__} multiplies matrices by it: "
                "call session.flush() before it is switched"
            )

    @contextlib.contextmanager
    def again(self, kind: str, *, guard: bool = False) -> Iterator[None]:
        """Have these settings, and nothing of the code around.

        Args:
            kind: type of the device on which updates are made.
            guard: this is the guard's thread; see [Note: settings of the process].
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
        """Set the number of threads, but not the one that new threads begin with."""
        if torch.get_num_threads() != self.threads:
            of_new = _in_a_thread(torch.get_num_threads)
            torch.set_num_threads(self.threads)
            if of_new != self.threads:
                _in_a_thread(torch.set_num_threads, of_new)


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
