"""Where a rank stands, and what it waits for there.

What it is: `Standing`, a few words that a session knows at any moment without reading a tensor, and
`awaited`, which reads off a stack which collective it is in. What it is not: how others hear of it
(`dynoffload.runtime.ranks.board`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_COLLECTIVES = _TORCH + "distributed" + os.sep
_BACKWARD = _TORCH + "autograd" + os.sep
_REPLICAS = os.path.join(_TORCH + "nn", "parallel", "distributed.py")
_WRAPPERS = ("wrapper", "_time_logger", "wait")  # what says less than the frame that called it


@dataclass(frozen=True)
class Standing:
    """Where one rank stands.

    Attributes:
        step: optimizer steps that are complete.
        phase: ``"forward"`` or ``"backward"``; "" before the first.
        site: path of the module that was visited last; "" where none is watched.
        gradient: name of the parameter whose gradient was made last; "" before the first.
        progress: grows with all that happens; what stands still has the same.
    """

    step: int = 0
    phase: str = ""
    site: str = ""
    gradient: str = ""
    progress: int = 0

    def describe(self) -> str:
        """Return it in words, such as ``"step 12, backward, at layers.3"``."""
        parts = [f"step {self.step}"]
        if self.phase:
            parts.append(self.phase)
        if self.phase == "backward" and self.gradient:
            parts.append(f"with the gradient of {self.gradient!r} made last")
        elif self.site:
            parts.append(f"at {self.site!r}")
        return ", ".join(parts)


def awaited(trace: TracebackType | FrameType | None) -> str:
    """Return what the innermost call on a stack waits for of other ranks, "" if for nothing.

    Args:
        trace: of an error, or the frame in which a thread is now.
    """
    frames = list(_frames(trace))
    for frame in reversed(frames):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_COLLECTIVES) and name not in _WRAPPERS:
            return f"the others in {name}()"
        if file == _REPLICAS:
            if any("_sync_buffers" in one.f_code.co_name for one in frames):
                return "the first rank's buffers"
            return f"the others in {name}() of DistributedDataParallel"
        if file.startswith(_BACKWARD):
            return "the reduction of gradients"
    return ""


def _frames(trace: TracebackType | FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, the innermost last."""
    if isinstance(trace, FrameType):
        found = []
        frame: FrameType | None = trace
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        yield from reversed(found)
        return
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
