"""Times steps of a layer: a forward and its backward, wherever that comes.

A `TimedStep` lives as long as the graph of its forward. So one whose backward never comes is known
by its end; until then its backward may come.
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
    """Of one step; None where a half was not made."""

    forward_s: float | None = None
    backward_s: float | None = None


class TimedStep:
    """A forward, and the backward that is to come.

    Args:
        exchange: of the layer.
        device: of its tokens.
        times: where its times go; None if they are not needed.

    Attributes:
        done: its backward has come.
        again: it was made in a backward pass.
    """

    def __init__(self, exchange: Exchange, device: torch.device, times: _Times | None) -> None:
        self._exchange, self._device, self._times = exchange, device, times
        self.done, self.again = False, in_backward()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Time the block; ranks have just met, as they exchanged their sizes."""
        start = time.perf_counter()
        yield
        if self._times is not None:
            self._times.forward_s = self._since(start)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Time the block, at whose beginning ranks meet if the step is timed."""
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


class StepTimer:
    """The steps of one layer."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[TimedStep] = weakref.WeakSet()
        self._times: _Times | None = None

    def start(self, exchange: Exchange, device: torch.device, *, timed: bool) -> TimedStep:
        """Return a new step; `state` has the times of the last one that is timed."""
        if timed:
            self._times = _Times()
        step = TimedStep(exchange, device, self._times if timed else None)
        self._alive.add(step)
        return step

    def state(self) -> list[float]:
        """Return what ranks exchange, of which the largest counts.

        Returns:
            1 where a backward may be to come, or is under way, else 0; 1 where the timed step has
            not been made, else 0; seconds of its forward; of its backward.
        """
        alive = list(self._alive)
        waits = any(not one.done for one in alive)
        if in_backward():  # of steps which were done, and whose graph is kept for another one
            waits = waits or any(not one.again for one in alive)
        times = self._times or _Times()
        missing = times.forward_s is None or times.backward_s is None
        return [float(waits), float(missing), times.forward_s or 0.0, times.backward_s or 0.0]

    def clear(self) -> None:
        """Forget all steps."""
        self._alive.clear()
        self._times = None
