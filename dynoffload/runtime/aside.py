"""Whether everything would fit in memory, were nothing paged: of now, and of what may still come.

What it is: `Whole`, by which a session decides to step aside and to page again. What it is not: the
stepping aside (see `dynoffload.runtime.session`), nor a look at activations, which `growth` has.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from dynoffload.runtime.adoption.changes import Changes
from dynoffload.runtime.counting import state_tensors, whole_bytes

ASIDE = 0.9
"""Of the budget: a session that needs no more than this steps aside."""


class Whole:
    """The bytes of a step that touches everything, the most that there have been since `reset`.

    So what is thawed now and then does not bring paging back each time.

    Args:
        model: the root.
        optimizer: its optimizer, or None.

    Attributes:
        most: bytes, without activations.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self.most = 0
        self._changes: Changes | None = None
        self._parameters: list[nn.Parameter] = []
        self._before = (0, 0, 0)

    def look(self) -> int:
        """Return what it is now."""
        now = whole_bytes(self._model, self._optimizer)
        self.most = max(self.most, now)
        return now

    def watch(self) -> None:
        """From now on notice what may have become more."""
        self.look()
        if self._changes is None:
            self._changes = Changes()
        self._changes.begin(self._model)
        self._parameters = list(self._model.parameters())
        self._before = self._signs()

    def reset(self) -> None:
        """Begin anew, and notice nothing until `watch` is called again."""
        self.most = 0
        if self._changes is not None:
            self._changes.close()
        self._changes, self._parameters = None, []

    def grew(self, *, stepped: bool) -> bool:
        """Return whether it is more than ever before.

        It counts only where something has changed: some 0.2 microseconds a parameter.

        Args:
            stepped: since the last call; sizes and the optimizer are looked at once a step.
        """
        assert self._changes is not None
        if not self._changes.any() and not (stepped and self._signs() != self._before):
            return False
        before = self.most
        self.watch()
        return self.most > before

    def _signs(self) -> tuple[int, int, int]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        nbytes = sum([one.nbytes for one in self._parameters])
        return nbytes, sum(len(g["params"]) for g in groups), state_tensors(self._optimizer)
