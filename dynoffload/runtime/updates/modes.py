"""The modes of torch under which an optimizer update is made, though it is made later or elsewhere.

A user's ``step()`` runs under modes of the process (default dtype, deterministic algorithms,
oneDNN), of its thread (number of threads, flushing of denormal numbers, autocast) and of the code
around it (inference mode, `torch.func` transformations, function and dispatch modes). An update
that is put off runs inside whatever reads the parameter next, maybe on another thread: it must be
made as at ``step()``, and what happens to be on there must not see it. A compiler that reads the
parameter is such a reader too: the optimizers of torch take other ways while
`torch.compiler.is_compiling()`.

[Note: autocast by its flags]  Autocast casts within the norms of Adafactor and the products of
Muon. Leaving a block of `torch.autocast` takes the lock of its cache, and so does a cast that may
be cached; that lock may be held by the thread that casts the very weight whose update is being
made. So flags are set instead, and nothing is cached.

[Note: modes that hold]  Two kinds cannot be carried over, so with them nothing is put off: a mode
or a profiler of the user's that watches operators would miss them, and no other thread flushes
denormals alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer

from dynoffload.runtime.unseen import hidden, is_watched

_LEAST = 5e-324  # the least denormal number
_CAST = ("Adafactor", "Muon")  # whose operators autocast casts; those of the others it does not


def flushes_denormals() -> bool:
    """Return whether this thread takes denormal numbers for zero."""
    return _LEAST * 1.0 == 0.0


def may_wait() -> bool:
    """Return whether updates of this moment may be made later; see [Note: modes that hold]."""
    return not (flushes_denormals() or is_watched())


@dataclass(frozen=True, slots=True)
class Modes:
    """What an update that waits takes with it.

    Attributes:
        dtype: the default dtype.
        deterministic: whether deterministic algorithms are asked for.
        warn_only: whether those that are missing are only warned of.
        threads: of one operator.
        mkldnn: whether oneDNN may multiply matrices.
        kind: type of the device on which updates are made.
        autocast: whether autocast is on for it.
        autocast_dtype: to what it casts.
    """

    dtype: torch.dtype
    deterministic: bool
    warn_only: bool
    threads: int
    mkldnn: bool
    kind: str
    autocast: bool
    autocast_dtype: torch.dtype

    @classmethod
    def now(cls, kind: str) -> Modes:
        """Return the modes of this moment, for updates on a device of type ``kind``."""
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_num_threads(),
            torch._C._get_mkldnn_enabled(),
            kind,
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
        )

    def suit(self, optimizer: Optimizer, others: Modes) -> bool:
        """Return whether an update under these modes is the one under ``others``."""
        if type(optimizer).__name__ not in _CAST:
            others = replace(others, autocast=self.autocast, autocast_dtype=self.autocast_dtype)
        return self == others

    @contextlib.contextmanager
    def again(self, *, own_thread: bool = False) -> Iterator[None]:
        """Have these modes, and none of the code around.

        Args:
            own_thread: this thread does nothing else: its number of threads need not come back.
        """
        with contextlib.ExitStack() as undo:
            now = Modes.now(self.kind)
            if now != self:
                undo.callback(now._set_globals if own_thread else now._set)
                self._set()
            if self.autocast:  # see [Note: autocast by its flags]
                undo.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            if flushes_denormals():
                undo.callback(torch.set_flush_denormal, True)
                torch.set_flush_denormal(False)
            if torch._C._functorch.peek_interpreter_stack() is not None:
                undo.enter_context(temporarily_clear_interpreter_stack())
            undo.enter_context(hidden())
            if torch.is_inference_mode_enabled():
                undo.enter_context(torch.inference_mode(False))
            if torch.compiler.is_compiling():
                undo.callback(_set_compiling, True)
                _set_compiling(False)
            yield

    def _set_globals(self) -> None:
        torch.set_default_dtype(self.dtype)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch._C._set_mkldnn_enabled(self.mkldnn)

    def _set(self) -> None:
        self._set_globals()
        torch.set_autocast_enabled(self.kind, self.autocast)
        torch.set_autocast_dtype(self.kind, self.autocast_dtype)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


def _set_compiling(compiling: bool) -> None:
    torch.compiler._is_compiling_flag = compiling
