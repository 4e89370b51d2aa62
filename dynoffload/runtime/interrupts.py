"""Signals wait while the runtime changes what must change as a whole.

Python runs signal handlers, such as the one that raises KeyboardInterrupt, between any two of its
steps. In the middle of an optimizer update that would leave memory locked for an update that nobody
remembers, or a parameter with half of its state. Between `hold` and `admit` such handlers are put
off: they run, and raise what they raise, as soon as the outermost pair is over.

Only handlers written in Python are put off, whatever their signal, and only the main thread runs
those. A second signal of a kind that is put off already is taken for the same one. Handlers are put
back whatever others raise meanwhile.
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
        self.came: dict[int, FrameType | None] = {}
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        self.came.setdefault(number, frame)

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
            frame = self.came.pop(number)
            try:
                self.handlers[number](number, frame)
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
            admit()

    return call
