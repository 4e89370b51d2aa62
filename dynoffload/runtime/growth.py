"""What samples add to memory while a session has stepped aside, and no hook sees what is saved.

What it is: a comparison of the heap's use after each forward with that before it, added up over a
step. What it is not: a limit; a sample that turns out too large has run by then, and the next one
is paged.
"""

from __future__ import annotations

from torch import nn

from dynoffload.memory.heap import live_bytes
from dynoffload.memory.limits import resident_bytes


class Growth:
    """Counts what the forwards of ``model`` leave in memory until the end of a step.

    Gradients are not counted: what holds them is counted elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._alive = self._depth = self._before = self._after = 0

    def begin(self) -> None:
        """A forward begins, the first of a step or another, or one within another."""
        self._depth += 1
        if self._depth == 1:
            self._before = self._used()
            # What was freed since the last forward was left by it; what was added is not ours.
            self._alive = max(0, self._alive - max(0, self._after - self._before))

    def finish(self) -> int:
        """A forward is over; return the bytes that the step's forwards have left and still hold."""
        self._depth -= 1
        if self._depth <= 0:
            self._depth, self._after = 0, self._used()
            self._alive += max(0, self._after - self._before)
        return self._alive

    def end(self) -> None:
        """The step is over."""
        self._alive = self._depth = self._before = self._after = 0

    def _used(self) -> int:
        live = live_bytes()
        gradients = sum(p.grad.nbytes for p in self._model.parameters() if p.grad is not None)
        return (resident_bytes() if live is None else live) - gradients
