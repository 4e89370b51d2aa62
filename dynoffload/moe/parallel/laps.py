"""Times of real steps of a layer: a forward and its backward, wherever that comes.

What it is: `Laps`, which knows which forwards have not had their backward yet, and what one of them
has taken. What it is not: an exchange of that among ranks (`dynoffload.moe.parallel.adapting`).

A `Lap` lives as long as the graph of its forward. So one whose backward will never come is known
by its end, and until then it counts as one whose backward may come.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dynoffload.moe.parallel.exchange import Exchange


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread, which runs a forward again."""
    return torch._C._current_graph_task_id() != -1


@dataclass(eq=False)
class _Times:
    """Of one lap; None where it was not made."""

    forward_s: float | None = None
    backward_s: float | None = None


class Lap:
    """A forward, and the backward that is to come.

    Args:
        exchange: of the layer.
        device: of its tokens.
        times: where its times go; None if nobody asks.

    Attributes:
        done: its backward has come.
        again: it was made in a backward pass.
    """

    def __init__(self, exchange: Exchange, device: torch.device, times: _Times | None) -> None:
        self._exchange, self._device, self._times = exchange, device, times
        self.done, self.again = False, in_backward()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Time the block; ranks have just met, as they told their sizes."""
        start = time.perf_counter()
        yield
        if self._times is not None:
            self._times.forward_s = self._since(start)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Time the block, at whose beginning ranks meet if the lap is timed."""
        if self._times is not None:
            self._exchange.largest([0.0], self._device, "the sign that it is at a backward")
        start = time.perf_counter()
        yield
        if self._times is not None and not self.done:
            self._times.backward_s = self._since(start)
        self.done = True

    def _since(self, start: float) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - start


class Laps:
    """The laps of one layer."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Lap] = weakref.WeakSet()
        self._times: _Times | None = None

    def start(self, exchange: Exchange, device: torch.device, *, timed: bool) -> Lap:
        """Return a new lap; the last one that is timed is told of."""
        if timed:
            self._times = _Times()
        lap = Lap(exchange, device, self._times if timed else None)
        self._alive.add(lap)
        return lap

    def told(self) -> list[float]:
        """Return what ranks tell each other, of which the largest counts.

        Returns:
            1 where a backward may be to come, or is under way, else 0; 1 where the timed lap has
            not been made, else 0; seconds of its forward; of its backward.
        """
        alive = list(self._alive)
        waits = any(not one.done for one in alive)
        if in_backward():  # that of laps which were done, and whose graph is kept for another one
            waits = waits or any(not one.again for one in alive)
        times = self._times or _Times()
        missing = times.forward_s is None or times.backward_s is None
        return [float(waits), float(missing), times.forward_s or 0.0, times.backward_s or 0.0]

    def clear(self) -> None:
        """Nothing is awaited any more."""
        self._alive.clear()
        self._times = None
