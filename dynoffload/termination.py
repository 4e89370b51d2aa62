"""Unwinds the stack on SIGTERM, so that files, processes and settings are cleaned up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """Make SIGTERM unwind the stack as Ctrl-C does, so that cleanup code runs.

    It has no effect if the process ignores SIGTERM, or off the main thread, as only that one may
    set handlers.
    """
    ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
