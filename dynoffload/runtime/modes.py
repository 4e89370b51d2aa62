"""Modes of a session: `Paging` moves its model's tensors, `Resident` leaves them in memory while
everything fits, and a plain `Mode` does nothing, as under ``dynoffload profile``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dynoffload.checkpoint.tensors import Memory, Ordinary
from dynoffload.runtime.passes.calls import Saving


class Mode:
    """What a session calls during training; this base leaves tensors alone.

    Attributes:
        paging: whether tensors are paged.
        gradient: the parameter whose gradient was computed last.
        saving: stores what autograd saves; None: autograd keeps it.
    """

    paging = False
    gradient = ""
    saving: Saving | None = None

    @property
    def spill_bytes(self) -> int:
        """Bytes of the spill file."""
        return 0

    @property
    def memory(self) -> Memory:
        """Where checkpoints find the tensors."""
        return Ordinary()

    @property
    def site(self) -> str:
        """The module visited last."""
        return ""

    def enter(self) -> None:
        """Called as the root is called, in training or not.

        Raises:
            StepLostError: the last step was lost.
        """

    def follow_model(self) -> None:
        """Adopt changes of the model, before a sample."""

    def begin_sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called as a training forward begins."""

    def end_sample(self, output: Any, *, whole: bool) -> None:
        """Called after it, with its ``output``; not ``whole``: it raised an error."""

    def leave(self) -> None:
        """Called after the root's call returned; raises as `enter` does."""

    def drop_forward(self) -> None:
        """Discard a forward that was interrupted."""

    def flush(self) -> None:
        """Apply all deferred updates."""

    def settle(self) -> None:
        """Apply all deferred updates; raises as `enter` does."""

    def loading(self, *, optimizer: bool) -> AbstractContextManager[Callable[[], None]]:
        """Return a context for loading a checkpoint into the model, and the ``optimizer`` if so. It
        yields a function to call before the first change; failing after that loses the step."""
        return contextlib.nullcontext(lambda: None)

    def close(self, *, stays: bool = False) -> str:
        """Make all tensors ordinary; ``stays``: on the training device, as training goes on.

        Returns:
            Where tensors that do not fit in memory are stored, or "".
        """
        return ""
