"""What samples add to memory in resident mode, where no hook sees what is saved.

The heap's use after each forward is compared with that before it, and added up over a step. A
sample that turns out too large has run by then, and the next one is paged.

[Note: what was freed]  Between two forwards of a step a backward frees what the first has left, but
others free memory too. So what was freed counts only as far as graphs have ended: a hook on the
output's node says so, as it is called in backward, or dies with the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dynoffload.memory.heap import live_bytes
from dynoffload.memory.limits import resident_bytes
from dynoffload.memory.local import local_bytes
from dynoffload.runtime.passes.activations import tensors_in


class _End:
    """Called when backward passes an output of a forward; dies with its graph."""

    def __init__(self) -> None:
        self.passed = False

    def __call__(self, *args: Any) -> None:
        self.passed = True


@dataclass
class _Left:
    """What one forward has left in memory, and the end of its graph; None if it has no graph."""

    nbytes: int
    end: weakref.ref[_End] | None

    def has_ended(self) -> bool:
        end = None if self.end is None else self.end()
        return end is None or end.passed


class Growth:
    """Counts what the forwards of ``model`` leave in memory until the end of a step.

    Gradients are not counted: what holds them is counted elsewhere.

    Args:
        model: the root.
        given: returns the bytes that an accelerator's allocator has given; None: on the CPU.
    """

    def __init__(self, model: nn.Module, given: Callable[[], int] | None = None) -> None:
        self._model, self._given = model, given
        self._left: list[_Left] = []
        self._alive = self._before = self._after = 0

    def begin(self) -> None:
        """A forward begins, the first of a step or another."""
        self._before = self._used()
        ended = sum(left.nbytes for left in self._left if left.has_ended())
        self._left = [left for left in self._left if not left.has_ended()]
        # See [Note: what was freed]; what was added since is not ours.
        self._alive = max(0, self._alive - min(ended, max(0, self._after - self._before)))

    def finish(self, output: Any = None) -> int:
        """A forward is over, with ``output``; return the bytes that the step's forwards have left
        and still hold."""
        self._after = self._used()
        nbytes = max(0, self._after - self._before)
        self._left.append(_Left(nbytes, _end_of(output)))
        self._alive += nbytes
        return self._alive

    def end(self) -> None:
        """The step is over."""
        self._left = []
        self._alive = self._before = self._after = 0

    def _used(self) -> int:
        live = live_bytes() if self._given is None else self._given()
        given = (p.grad for p in self._model.parameters() if p.grad is not None)
        gradients = sum(map(local_bytes, given))
        return (resident_bytes() if live is None else live) - gradients


def _end_of(output: Any) -> weakref.ref[_End] | None:
    nodes = [tensor.grad_fn for tensor in tensors_in(output, 3) if tensor.grad_fn is not None]
    if not nodes:
        return None
    end = _End()
    for node in nodes:
        node.register_hook(end)
    return weakref.ref(end)
