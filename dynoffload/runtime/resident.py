"""Resident mode: everything that a step takes fits the budget, so nothing is paged.

While a model is paged, `Fit` decides whether everything would fit. Afterwards `Resident` checks
that it still does. In between, the session makes the tensors ordinary.

No hook sees saved tensors in resident mode. So `Growth` takes the heap's growth over each forward,
and sums it over a step. A sample that is too large is found after it ran, and the next is paged.

[Note: what was freed]  Between two forwards of a step, a backward frees what the first has left,
but other code frees memory too. So freed bytes count only up to those left by forwards whose graphs
have ended. A hook on the output's node shows this: backward calls it, or it dies with the graph.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dynoffload.memory.heap import live_bytes
from dynoffload.memory.limits import resident_bytes
from dynoffload.memory.local import local_bytes
from dynoffload.runtime.adoption.changes import Changes
from dynoffload.runtime.counting import ordinary_bytes, state_tensors, whole_bytes
from dynoffload.runtime.modes import Mode
from dynoffload.runtime.overlap import gradient_bytes
from dynoffload.runtime.paging import Paging
from dynoffload.runtime.passes.activations import tensors_in
from dynoffload.runtime.recording import Recording
from dynoffload.runtime.unseen import unseen
from dynoffload.telemetry import StepStats
from dynoffload.units import KiB

_GRAPH = 128 * KiB  # nodes of a small forward's graph: the heap has them, and no page
_MEASURED_STEPS = 3  # steps measured before paging stops; twice as many each time it has come back
_GROWTH = 1.1  # samples larger than the measured ones by this factor are always paged again


def stays(need: int, budget: int) -> bool:
    """Return whether a session stops paging under ``budget`` if its steps take ``need`` bytes."""
    return need + _GRAPH <= budget


class Fit:
    """Decides whether everything a step takes would fit the budget, measured while it is paged.

    Attributes:
        largest: the size of the largest sample so far.
        whole: bytes of a step that touches everything, without activations: the most since
            `reset`, so parameters that are thawed now and then do not end resident mode each time.
        alive: bytes of activations, the most since `reset`.
        least: those of the step with the fewest.
        beside: those of them that are alive beside all gradients; see `Overlap`.
        more: bytes of partial gradients, and on an accelerator of temporaries.
        kept: bytes of gradients that were there as a forward began.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, budget: int) -> None:
        self.model, self.optimizer, self.budget = model, optimizer, budget
        self.largest = 0
        self._wait = _MEASURED_STEPS
        self.whole = self.alive = self.least = self.beside = self.more = 0
        self.kept = self._steps = 0

    @property
    def need(self) -> int:
        """Bytes that a step takes without paging; activations may differ as much once more."""
        return self.whole + self.beside + self.more + self.alive - self.least

    @property
    def growth(self) -> float:
        """How much larger than the largest measured a sample may be: activations may grow as the
        square of its size."""
        spare = (self.budget - self.need) / max(1, self.alive + self.more)
        return min(_GROWTH, math.sqrt(1 + max(0.0, spare)))

    @property
    def overlaps(self) -> bool:
        """Whether activations fit only where gradients are made after they were freed."""
        return not stays(self.whole + self.alive + self.more, self.budget)

    def reset(self) -> None:
        """Restart the measurement."""
        self.largest = self._steps = 0
        self.whole = self.alive = self.least = self.beside = self.more = self.kept = 0
        self._wait *= 2

    def count(self) -> None:
        """Count existing bytes, and those of gradients and state still to be made."""
        self.whole = max(self.whole, whole_bytes(self.model, self.optimizer))

    def holds(self, stats: StepStats, paging: Paging) -> bool:
        """Return whether everything fits, judging by this step of ``paging`` and earlier ones."""
        temporaries = max(0, stats.peak_allocated_bytes - stats.peak_fast_bytes)
        # Without slices, backward makes whole gradients of a parameter that are then added up.
        added = sum(p.nbytes for one in paging.rows if (p := one.parameter).requires_grad)
        step = paging.overlap
        self.least = min(self.least, step.alive) if self._steps else step.alive
        self.alive, self.kept = max(self.alive, step.alive), max(self.kept, step.kept)
        self.beside, self.more = max(self.beside, step.beside), max(self.more, temporaries + added)
        self._steps += 1
        if self._steps < self._wait or not stays(self.need, self.budget):
            return False  # counting takes a millisecond, and cannot find less
        self.count()
        return stays(self.need, self.budget)


class Resident(Mode):
    """Keeps everything in memory, and checks that it stays within the budget; see `Mode`.

    ``given`` returns the bytes that an accelerator's allocator has allocated; None: on the CPU.
    """

    def __init__(self, fit: Fit, recording: Recording, given: Callable[[], int] | None) -> None:
        self._fit, self._recording = fit, recording
        recording.stay(fit.alive, fit.beside)
        self._growth = Growth(given)
        self._too_large = False
        self._stepped = False  # since the last sample
        self._changes = Changes()
        self._ordinary: tuple[tuple[int, ...], int] | None = None
        self._watch()
        hook: Any = None if fit.optimizer is None else fit.optimizer.register_step_post_hook
        self._handle = None if hook is None else hook(lambda *_: self._end_step())

    def outgrown(self, size: int) -> str:
        """Return why a sample of ``size`` must be paged, or "" if it fits. It reads no content."""
        if self._too_large or size > self._fit.largest * self._fit.growth:
            return "a larger sample than any measured"
        if self._fit.overlaps and gradient_bytes(self._parameters) > self._fit.kept:
            return "a forward beside more gradients than any measured"
        stepped, self._stepped = self._stepped, False
        if not self._changes.any() and not (stepped and self._counts() != self._seen):
            return ""
        before = self._fit.whole
        self._watch()
        return "more is trained than when paging stopped" if self._fit.whole > before else ""

    def _watch(self) -> None:
        self._fit.count()
        self._ordinary = None
        self._changes.begin(self._fit.model)
        self._parameters = list(self._fit.model.parameters())
        self._seen = self._counts()

    def outside_bytes(self) -> int:
        """Return the bytes of the model's tensors. All but gradients are counted again only once
        there are more or fewer: that takes milliseconds."""
        buffers = sum(local_bytes(one) for one in self._fit.model.buffers())
        gradients, counts = gradient_bytes(self._parameters), (buffers, *self._counts())
        if self._ordinary is None or self._ordinary[0] != counts:
            whole = ordinary_bytes(self._fit.model, self._fit.optimizer)
            self._ordinary = counts, whole - gradients
        return self._ordinary[1] + gradients

    def _counts(self) -> tuple[int, int, int]:
        """Return counts that show whether more is trained: some 0.2 microseconds a parameter."""
        optimizer = self._fit.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        nbytes = sum([one.nbytes for one in self._parameters])
        return nbytes, sum(len(g["params"]) for g in groups), state_tensors(optimizer)

    def begin_sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._growth.begin(self._parameters)

    def end_sample(self, output: Any, *, whole: bool) -> None:
        """See `Mode.end_sample`: measures what the step's forwards have left in memory."""
        left = self._growth.finish(self._parameters, output)
        self._too_large = self._fit.whole + self._recording.grew(left) > self._fit.budget

    @unseen
    def _end_step(self) -> None:
        self._stepped = True
        self._growth.end()
        self._recording.end_step(None, (), math.nan)

    def close(self, *, stays: bool = False) -> str:
        if self._handle is not None:
            self._handle.remove()
        return ""


class _End:
    """A hook: backward calls it as it passes an output of a forward. It dies with the graph."""

    def __init__(self) -> None:
        self.passed = False

    def __call__(self, *args: Any) -> None:
        self.passed = True


@dataclass
class _Left:
    """What a forward has left in memory, and its graph's hook; None if it has no graph."""

    nbytes: int
    end: weakref.ref[_End] | None

    def has_ended(self) -> bool:
        end = None if self.end is None else self.end()
        return end is None or end.passed


class Growth:
    """Measures what the forwards of a model leave in memory until the end of a step.

    Gradients, those of the given parameters, are not included; they are counted elsewhere.

    Args:
        given: returns the bytes that an accelerator's allocator has allocated; None: on the CPU.
    """

    def __init__(self, given: Callable[[], int] | None = None) -> None:
        self._given = given
        self._left: list[_Left] = []
        self._alive = self._before = self._after = 0

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called as a forward begins, the first of a step or a later one."""
        self._before = self._used(parameters)
        ended = sum(left.nbytes for left in self._left if left.has_ended())
        self._left = [left for left in self._left if not left.has_ended()]
        # See [Note: what was freed]; memory added since is not from forwards.
        self._alive = max(0, self._alive - min(ended, max(0, self._after - self._before)))

    def finish(self, parameters: Iterable[nn.Parameter], output: Any = None) -> int:
        """Called after a forward with ``output``. Return the bytes that the step's forwards have
        left and still hold."""
        self._after = self._used(parameters)
        nbytes = max(0, self._after - self._before)
        self._left.append(_Left(nbytes, _end_of(output)))
        self._alive += nbytes
        return self._alive

    def end(self) -> None:
        """Called as the step ends."""
        self._left = []
        self._alive = self._before = self._after = 0

    def _used(self, parameters: Iterable[nn.Parameter]) -> int:
        live = live_bytes() if self._given is None else self._given()
        return (resident_bytes() if live is None else live) - gradient_bytes(parameters)


def _end_of(output: Any) -> weakref.ref[_End] | None:
    nodes = [tensor.grad_fn for tensor in tensors_in(output, 3) if tensor.grad_fn is not None]
    if not nodes:
        return None
    end = _End()
    for node in nodes:
        node.register_hook(end)
    return weakref.ref(end)
