"""How ``kill`` ends what has files, processes or settings to take back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does: what was switched on is switched off.

    Where the process ignores SIGTERM it goes on doing so, and so it does off the main thread, which
    alone may set handlers.
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
