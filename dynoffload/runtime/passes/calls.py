"""Tracks calls of the root: the outermost one, and the saved-tensor hooks active while it runs.

[Note: threads]  Any thread may call the root, but only one at a time: plans predict one order, and
saved-tensor hooks are thread-local. A call during another thread's call is refused before it
changes anything.

[Note: torn down]  An interrupt ends a call without running its hooks. So a call is identified by a
frame that lives as long: the `nn.Module` frame that runs the hooks and then forward. A call whose
frame is on no stack has ended.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from dynoffload.errors import ThreadError
from dynoffload.runtime.interrupts import uninterrupted

logger = logging.getLogger(__name__)


class Saving(Protocol):
    """Packs the tensors that autograd saves, and unpacks them."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the stand-in for a saved tensor."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor of the stand-in ``packed``."""


class _OfThread(threading.local):
    """The saved-tensor hooks of one session that are active in this thread, or None."""

    saving: torch.autograd.graph.saved_tensors_hooks | None = None

    def begin(self, saving: Saving) -> None:
        self.saving = torch.autograd.graph.saved_tensors_hooks(saving.pack, saving.unpack)
        self.saving.__enter__()

    def end(self) -> None:
        if self.saving is not None:
            self.saving.__exit__(None, None, None)
            self.saving = None


class Calls:
    """Tracks the calls of one session's root."""

    def __init__(self) -> None:
        self._depth = 0
        self._frame: FrameType | None = None  # of the outermost call
        self._thread = 0  # that runs the outermost call
        self._claiming = threading.Lock()
        self._of_thread = _OfThread()
        self._warned = False

    @uninterrupted
    def enter(self) -> bool:
        """Begin a call, from its forward pre-hook; return whether it is the outermost.

        Raises:
            ThreadError: another thread is in a call of the root; see [Note: threads].
        """
        frame, thread = _frame_of_call(), threading.get_ident()
        with self._claiming:
            if self._depth:
                inner = frame if thread == self._thread else sys._current_frames().get(self._thread)
                if not _runs(self._frame, inner):
                    self._depth = 0  # see [Note: torn down]
                elif thread != self._thread:
                    raise ThreadError(
                        "two threads call the model at once, and under offload() one may at a "
                        "time: hold a threading.Lock around each forward, with its backward and "
                        "step"
                    )
            if not self._depth:
                self._frame, self._thread = frame, thread
                self._of_thread.end()  # left by a call that was torn down in this thread
            self._depth += 1
            return self._depth == 1

    @uninterrupted
    def save_to(self, saving: Saving) -> None:
        """Make ``saving`` pack the tensors that autograd saves until the outermost call ends."""
        if not _hooks_of_others():
            self._of_thread.begin(saving)
        elif not self._warned:
            self._warned = True
            logger.warning(
                "the model is called where saved-tensor hooks are disabled, or others are at work: "
                "what autograd saves there is neither moved nor counted"
            )

    @uninterrupted
    def leave(self) -> bool:
        """End a call, possibly after an error; return whether it was the outermost."""
        if not self._depth or self._thread != threading.get_ident():
            return False  # this call was refused
        if self._depth > 1:
            self._depth -= 1
            return False
        error = sys.exc_info()[1]
        if self._of_thread.saving is not None and "saved tensor hooks" in str(error):
            assert error is not None
            error.add_note(
                "dynoffload: what autograd saves is paged by such hooks; pass "
                "config={'page_activations': False} to offload(), which leaves it in memory"
            )
        self.abandon()
        return True

    def abandon(self) -> None:
        """Forget the running call."""
        self._of_thread.end()
        self._depth, self._frame = 0, None


def _frame_of_call() -> FrameType | None:
    """Return the `nn.Module` frame that called the running hook; see [Note: torn down]."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back  # skip our frames, and those that `torch.compile` adds
    return frame


def _runs(frame: FrameType | None, inner: FrameType | None) -> bool:
    """Return whether ``frame`` is ``inner`` or one of its direct or indirect callers."""
    while inner is not None:
        if inner is frame:
            return True
        inner = inner.f_back
    return False


def _hooks_of_others() -> bool:
    """Return whether user saved-tensor hooks are active, or all such hooks are disabled."""
    autograd = torch._C._autograd
    return (
        not autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        or autograd._top_saved_tensors_default_hooks(True) is not None
    )
