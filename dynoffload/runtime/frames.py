"""Lets go of what the tracebacks of an error keep alive: locals that are tensors of a device, or
views of a parameter that is to go back to the meta device."""

from __future__ import annotations

import contextlib
import os
import traceback

from dynoffload import memory, runtime

_OURS = tuple(f"{directory}{os.sep}" for p in (runtime, memory) for directory in p.__path__)


def clear_frames(error: BaseException | None, *, ours: bool = True) -> None:
    """Forget the locals of the frames that ``error``, and what it came from, have left.

    Args:
        error: an exception that is on its way.
        ours: of this library's functions only; else a debugger finds no user's locals either.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if not ours or frame.f_code.co_filename.startswith(_OURS):
                with contextlib.suppress(RuntimeError):  # it runs still
                    frame.clear()
