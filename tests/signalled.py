"""Signals that come at a chosen line of the library, for the tests of interrupts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import dynoffload

LIBRARY = str(Path(dynoffload.__file__).parent)
RUNTIME = str(Path(LIBRARY) / "runtime")


class At:
    """Traces a thread and sends a signal at the ``n``-th line of some files, at none for n < 1.

    Args:
        n: counted from 1.
        within: what the names of the files begin with.
        without: files that do not count.
        number: the signal.

    Attributes:
        lines: that were counted so far.
    """

    def __init__(
        self,
        n: int,
        within: str = RUNTIME,
        without: tuple[str, ...] = (),
        number: int = signal.SIGINT,
    ) -> None:
        self._n, self._within, self._without, self._number = n, within, without, number
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        file = frame.f_code.co_filename
        return self._line if file.startswith(self._within) and file not in self._without else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._n:
                signal.raise_signal(self._number)
        return self._line


@contextmanager
def tracing(at: At | None) -> Iterator[None]:
    """Have ``at`` trace this thread."""
    sys.settrace(at)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler,
    *numbers: int,
) -> Iterator[None]:
    """Handle signals so; Ctrl-C, if none are given: the test runner may be started without it."""
    numbers = numbers or (signal.SIGINT,)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
