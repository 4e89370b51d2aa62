"""Whether model and optimizer are half of two steps, and what makes up for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dynoffload.errors import StepLostError

Part = Literal["model", "optimizer"]

_REMEDY = (
    "go on from the last checkpoint, by session.load(), or by load_state_dict() of the whole model "
    "and of the optimizer"
)
_UNDONE = (
    "parameters and optimizer state are those of the step before it (what a scheduler or a scaler "
    "has counted is not undone)"
)


class Loss:
    """What cut a step or a load off half way, until all parts were loaded since.

    Args:
        parts: those that there are.

    Attributes:
        error: what cut it off, or None where nothing is lost.
        on_part: called with each part that was loaded as a whole.
        undo: makes all of one step again, and returns whether it could.
        within: whether a step is being made, which undoes and tells by itself.
    """

    def __init__(self, *parts: Part) -> None:
        self._needed = set(parts)
        self.error: BaseException | None = None
        self.on_part: Callable[[Part], None] = lambda part: None
        self.undo: Callable[[], bool] = lambda: False
        self.within = False
        self._untold: BaseException | None = None  # the last, until somebody was refused by it
        self._parts: set[Part] = set()  # loaded since

    def __bool__(self) -> bool:
        return self.error is not None

    def set(self, error: BaseException, *, told: bool = False) -> None:
        """A step or a load was cut off by ``error``, which somebody was ``told`` as such."""
        self.error, self._untold = error, None if told else error
        self._parts.clear()

    def make_up(self, part: Part) -> None:
        """``part`` was loaded as a whole: a loss is made up for once all were."""
        self._parts.add(part)
        if self._parts >= self._needed:
            self.forgive()
        self.on_part(part)

    def outlast(self) -> None:
        """The block is over: keep what refuses, and nothing that was alive in it."""
        self.undo = lambda: False
        error = self.error
        if error is not None:
            first = error.__cause__ if isinstance(error, StepLostError) else None
            error = first or error
            self.error = StepLostError(f"{type(error).__name__}: {error}")
        self._untold = None

    def has(self, part: Part) -> bool:
        """Return whether ``part`` is lost, and was not loaded since."""
        return bool(self) and part not in self._parts

    def forgive(self) -> None:
        """All is of one step again."""
        self.error = self._untold = None
        self._parts.clear()

    def check(self) -> None:
        """Refuse whatever needs all to be of one step, unless the step can be undone.

        Raises:
            StepLostError: naming the remedy, from what cut the step off.
        """
        self._refuse(self.error)

    def tell(self) -> None:
        """Raise what has refused nobody so far.

        Raises:
            StepLostError: as `check`.
        """
        self._refuse(self._untold)

    def tell_undone(self) -> None:
        """Undo what was cut off, if that is possible.

        Raises:
            StepLostError: all is of one step again, the one before.
        """
        error = self.error
        if error is not None and self.undo():
            raise StepLostError(
                "the last step was cut off, as an update that it had put off could not be made: it "
                f"is lost and undone, and {_UNDONE}; call zero_grad(), and go on from there"
            ) from error

    def _refuse(self, error: BaseException | None) -> None:
        self._untold = None
        if error is None:
            return
        self.tell_undone()
        raise StepLostError(
            "a step, an update that it had put off, or a load was cut off, so model and optimizer "
            f"are half of one step and half of another: the step is lost; {_REMEDY}"
        ) from error


def note_lost(error: BaseException) -> None:
    """Say in ``error``, which is raised on, that a step is lost by it."""
    error.add_note(f"dynoffload: this has cut off an optimizer step: the step is lost; {_REMEDY}.")


def note_undone(error: BaseException) -> None:
    """Say in ``error``, which is raised on, that its step is undone."""
    error.add_note(
        f"dynoffload: this has cut off an optimizer step, which is undone: {_UNDONE}. Gradients "
        "are as they were."
    )
