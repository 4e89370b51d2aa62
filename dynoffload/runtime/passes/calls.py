"""Calls of the root: which is the outermost, and the saved-tensor hooks that hold while it runs.

[Note: threads]  Any thread may call the root, but one at a time: what runs next is one order, and
hooks on saved tensors are a thread's own. A call that comes while another thread's is on its stack
is refused before it changes anything.

[Note: torn down]  An interrupt leaves a call without its hooks being run. So a call is known by a
frame that lives as long as it does: the one of `nn.Module` that runs the hooks and then forward. A
call whose frame is on no stack has ended.
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
    """Takes over what autograd saves, and gives it back."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what stands for a tensor that is saved."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor for which ``packed`` stands."""


class _OfThread(threading.local):
    """The saved-tensor hooks of one session at work in this thread, or None."""

    saving: torch.autograd.graph.saved_tensors_hooks | None = None

    def begin(self, saving: Saving) -> None:
        self.saving = torch.autograd.graph.saved_tensors_hooks(saving.pack, saving.unpack)
        self.saving.__enter__()

    def end(self) -> None:
        if self.saving is not None:
            self.saving.__exit__(None, None, None)
            self.saving = None


class Calls:
    """The calls of one session's root."""

    def __init__(self) -> None:
        self._depth = 0
        self._frame: FrameType | None = None  # of the outermost
        self._thread = 0  # in which that runs
        self._claiming = threading.Lock()
        self._of_thread = _OfThread()
        self._warned = False

    @uninterrupted
    def enter(self) -> bool:
        """A call begins, whose hook calls this; return whether it is the outermost.

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
                self._of_thread.end()  # of a call that was torn down in this thread
            self._depth += 1
            return self._depth == 1

    @uninterrupted
    def save_to(self, saving: Saving) -> None:
        """Have ``saving`` take over what autograd saves until the outermost call ends."""
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
        """A call has ended, maybe by an error; return whether it was the outermost."""
        if not self._depth or self._thread != threading.get_ident():
            return False  # it was refused
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
        """Forget the call that runs."""
        self._of_thread.end()
        self._depth, self._frame = 0, None


def _frame_of_call() -> FrameType | None:
    """Return the frame that calls the hook that runs now; see [Note: torn down]."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back  # ours, and what `torch.compile` puts around a hook
    return frame


def _runs(frame: FrameType | None, inner: FrameType | None) -> bool:
    """Return whether ``frame`` is ``inner`` or one that called it, however indirectly."""
    while inner is not None:
        if inner is frame:
            return True
        inner = inner.f_back
    return False


def _hooks_of_others() -> bool:
    """Return whether saved-tensor hooks of the user's are at work, or all are disabled."""
    autograd = torch._C._autograd
    return (
        not autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        or autograd._top_saved_tensors_default_hooks(True) is not None
    )
