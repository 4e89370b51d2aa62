"""Defers signals while the runtime makes changes that must be complete.

Python runs signal handlers, such as the one that raises KeyboardInterrupt, between any two
bytecodes. In the middle of an optimizer update, that would leave memory locked, or a parameter with
half of its state. So handlers are deferred from `hold` to `admit`. They run, and may raise, when
the outermost pair ends. Long operations admit them earlier: `let_come` at points where the work can
be undone, `interruptible` around user code.

Only Python handlers are deferred; they run in the main thread only. Repeats of a signal that is
deferred already are merged into one.

[Note: frames]  A handler gets the frame in which it runs, not the one that the signal interrupted.
Exceptions keep the handler's frame alive, and the interrupted one may hold device tensors.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# The unwrapped functions: the enum conversion in `signal` makes them ten times slower, and they run
# some thousand times a step.
_plain: Any = sys.modules.get("_signal", signal)
_get, _set = _plain.getsignal, _plain.signal
_WITHOUT_HANDLER = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
_SIGNALS = sorted(int(number) for number in signal.valid_signals() - _WITHOUT_HANDLER)


class _Held:
    """The signals that arrived during one outermost call."""

    def __init__(self) -> None:
        self.came: dict[int, None] = {}  # in order of arrival
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        self.came.setdefault(number)

    def begin(self) -> None:
        for number, handler in zip(_SIGNALS, map(_get, _SIGNALS), strict=True):
            if callable(handler):
                self.handlers[number] = handler
                _set(number, self.note)

    def end(self) -> None:
        try:
            for number, handler in self.handlers.items():
                if _get(number) == self.note:  # else a new handler was set meanwhile: keep it
                    _set(number, handler)
        except BaseException:  # raised by a handler that is restored already
            self.end()
            raise

    def pass_on(self) -> None:
        """Run the handlers of deferred signals; an exception propagates after all have run."""
        while self.came:
            number = next(iter(self.came))
            del self.came[number]
            try:
                self.handlers[number](number, sys._getframe())  # see [Note: frames]
            finally:
                self.pass_on()


_held: _Held | None = None  # _held and _depth are used by the main thread only
_depth = 0


def hold() -> None:
    """Defer signal handlers until `admit` was called as often as this."""
    global _held, _depth
    if threading.current_thread() is not threading.main_thread():
        return
    if _held is None:
        held = _Held()
        try:
            held.begin()
        except BaseException:  # raised by a handler that was not replaced yet
            try:
                held.end()
            finally:
                held.pass_on()
            raise
        _held = held
    _depth += 1


def admit() -> None:
    """End a `hold`; the outermost one's end runs the handlers of deferred signals."""
    global _held, _depth
    if _held is None or threading.current_thread() is not threading.main_thread():
        return
    _depth -= 1
    if _depth == 0:
        held, _held = _held, None
        try:
            held.end()
        finally:
            held.pass_on()


def uninterrupted(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Defer signal handlers while ``function`` runs."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        hold()
        try:
            return function(*args, **kwargs)
        finally:
            del args, kwargs  # an exception raised below would keep them alive
            admit()

    return call


def _are_held() -> bool:
    return _held is not None


def let_come() -> None:
    """Run the handlers of deferred signals; later signals are deferred as before.

    For long deferrals: call it where an exception from a handler is undone like any error.
    """
    if _held is not None and threading.current_thread() is threading.main_thread():
        _held.pass_on()


def interruptible(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Admit signals while ``function`` runs. Afterwards they are deferred as before, also if a
    handler's exception ends it."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        global _depth
        if _held is None or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        depth, _depth = _depth, 1
        try:
            try:
                admit()
                return function(*args, **kwargs)
            finally:
                del args, kwargs
                hold()
        finally:
            if not _are_held():  # a handler raised before hold() took effect
                hold()
            _depth = depth

    return call
