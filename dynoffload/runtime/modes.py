"""How a session keeps its model's tensors: `Paging` moves them, `Resident` leaves them in memory
while everything fits, and a `Mode` itself does nothing, as under ``dynoffload profile``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dynoffload.checkpoint.tensors import Memory, Ordinary
from dynoffload.runtime.passes.calls import Saving


class Mode:
    """What a session asks of the way in which tensors are kept; here they are left alone.

    Attributes:
        paging: whether tensors are paged.
        saving: takes over what autograd saves; None: autograd keeps it.
    """

    paging = False
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
        """The module that was visited last."""
        return ""

    @property
    def gradient(self) -> str:
        """The parameter whose gradient was made last."""
        return ""

    def enter(self) -> None:
        """The root is called, to train or not.

        Raises:
            StepLostError: the last step was lost.
        """

    def follow_model(self) -> None:
        """Adopt what has changed in the model, before a sample."""

    def begin_sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins."""

    def end_sample(self, output: Any, *, whole: bool) -> None:
        """It has ended with ``output``; not ``whole``: by an error."""

    def leave(self) -> None:
        """The call of the root has returned; raises as `enter` does."""

    def drop_forward(self) -> None:
        """A forward that was interrupted will not go on."""

    def flush(self) -> None:
        """Make every update that was deferred."""

    def settle(self) -> None:
        """Make every update that was deferred; raises as `enter` does."""

    def loading(self, *, optimizer: bool) -> AbstractContextManager[Callable[[], None]]:
        """Around loading a checkpoint into the model, and into the optimizer if so; yields what is
        called before anything is changed. A load that is cut off then is a lost step."""
        return contextlib.nullcontext(lambda: None)

    def close(self, *, stays: bool = False) -> str:
        """Make all tensors ordinary; ``stays``: where operators run, as training goes on.

        Returns:
            Where what does not fit in memory lies now, or "".
        """
        return ""
