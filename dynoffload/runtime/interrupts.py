"""Signals wait while the runtime changes what must change as a whole.

Python runs signal handlers, such as the one that raises KeyboardInterrupt, between any two of its
steps. In the middle of an optimizer update that would leave memory locked, or a parameter with half
of its state. Between `hold` and `admit` such handlers are put off: they run, and raise what they
raise, as soon as the outermost pair is over. What takes long lets them in: `let_come` where what
was begun can be undone, and `interruptible` around user code.

Only handlers written in Python are put off, and only the main thread runs those. A second signal of
a kind that is put off already is taken for the same one.

[Note: frames]  A handler is given the frame in which it is run, not the one that the signal came
in: that one's locals may be tensors of a device, and whoever raises keeps what he was given.
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

# Without the wrappers that make enumerations of their answers, ten times slower: these run some
# thousand times a step.
_plain: Any = sys.modules.get("_signal", signal)
_get, _set = _plain.getsignal, _plain.signal
_WITHOUT_HANDLER = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
_SIGNALS = sorted(int(number) for number in signal.valid_signals() - _WITHOUT_HANDLER)


class _Held:
    """The signals that came during one outermost call."""

    def __init__(self) -> None:
        self.came: dict[int, None] = {}  # in their order
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
                if _get(number) == self.note:  # else set anew meanwhile, and it stays
                    _set(number, handler)
        except BaseException:  # raised by a handler that is in its place again
            self.end()
            raise

    def pass_on(self) -> None:
        """Run the handlers of what came; one that raises does so after all have run."""
        while self.came:
            number = next(iter(self.came))
            del self.came[number]
            try:
                self.handlers[number](number, sys._getframe())  # see [Note: frames]
            finally:
                self.pass_on()


_held: _Held | None = None  # these two are the main thread's alone
_depth = 0


def hold() -> None:
    """Put signal handlers off until `admit` was called as often as this."""
    global _held, _depth
    if threading.current_thread() is not threading.main_thread():
        return
    if _held is None:
        held = _Held()
        try:
            held.begin()
        except BaseException:  # raised by a handler that was in its place still
            try:
                held.end()
            finally:
                held.pass_on()
            raise
        _held = held
    _depth += 1


def admit() -> None:
    """Run the handlers of what came since `hold`, if this ends the outermost."""
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
    """Put signal handlers off while ``function`` runs."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        hold()
        try:
            return function(*args, **kwargs)
        finally:
            del args, kwargs  # what is raised now would keep them
            admit()

    return call


def _are_held() -> bool:
    return _held is not None


def let_come() -> None:
    """Run the handlers of what came so far; what comes from now on is put off as before.

    Where signals are held off for long, this is for the places at which whatever one raises is
    undone like any error.
    """
    if _held is not None and threading.current_thread() is threading.main_thread():
        _held.pass_on()


def interruptible(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let signals through while ``function`` runs; around it they are put off as before, also when
    it is left by what one raises."""

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
            if not _are_held():  # one came before they were put off
                hold()
            _depth = depth

    return call
