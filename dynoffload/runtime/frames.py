"""Clears locals that an error's traceback keeps alive: tensors of a device, or views of a parameter
that returns to the meta device."""

from __future__ import annotations

import contextlib
import os
import traceback

from dynoffload import memory, runtime

_OURS = tuple(f"{directory}{os.sep}" for p in (runtime, memory) for directory in p.__path__)


def clear_frames(error: BaseException | None, *, ours: bool = True) -> None:
    """Clear the locals of the frames that ``error``, its causes and contexts have left.

    Args:
        error: an exception being handled.
        ours: clear frames of this library only; else a debugger finds no user locals either.
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
                with contextlib.suppress(RuntimeError):  # the frame is still running
                    frame.clear()
