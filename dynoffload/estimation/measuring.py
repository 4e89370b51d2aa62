"""Steps of a network as they would be plainly, measured without training it.

What it is: `measure`, which runs forward and backward on a few batches, records and times them, and
times the optimizer on tensors like the model's. Weights, buffers, gradients and random numbers are
afterwards what they were. What it is not: anything that knows of a budget.

[Note: gradients]  Each gradient is dropped as it is complete, so that a model of which only one
layer fits in memory can be measured.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.pilot.progress import Report
from dynoffload.planning.footprint import temporaries
from dynoffload.profiler.profiling import call_model, loss_of
from dynoffload.profiler.recorder import Recorder
from dynoffload.profiler.trace import Trace
from dynoffload.runtime.counting import States, is_trained
from dynoffload.simulation.recorded import Network, Recorded, network_of, recorded
from dynoffload.units import MiB

Loss = Callable[[Any, Any], torch.Tensor]

_TIMED = 5  # times that each batch is timed
_UPDATED = 128 * MiB  # of parameters on which the optimizer is timed
_UPDATES = 4  # of which the first makes the state


@dataclass(frozen=True)
class Measured:
    """What is known of plain steps.

    Attributes:
        network: what moves of it.
        steps: what happens in each, with the times of plain steps.
        temporaries: most bytes at once, in any, of what forward and backward make and do not save.
    """

    network: Network
    steps: tuple[Recorded, ...]
    temporaries: int

    @property
    def seconds(self) -> float:
        """Median seconds of a plain step."""
        return median(plain_seconds(step) for step in self.steps)

    @property
    def saved_bytes(self) -> int:
        """Bytes that the step which saves most saves for backward."""
        return max(step.saved_bytes for step in self.steps)


def plain_seconds(step: Recorded) -> float:
    """Return how long a step takes plainly."""
    return sum(piece.seconds for piece in (*step.forward, *step.backward)) + step.update_s


def measure(
    model: nn.Module,
    optimizer: Optimizer | None,
    batches: Sequence[Any],
    loss: Loss | None,
    report: Report,
) -> Measured:
    """Measure a plain step of each batch.

    Args:
        model: computes for real; see `dynoffload.estimation.hollow` for one that is on meta.
        optimizer: its optimizer; it makes no step.
        batches: at least one.
        loss: as for `dynoffload.profile`.
        report: told what is done.

    Raises:
        ConfigError: there is no batch, or the optimizer cannot be timed.
        TraceError: a batch gives no loss.
    """
    if not batches:
        raise ConfigError("no batch to measure a step of: pass at least one")
    traces: list[Trace] = []
    times: list[tuple[float, float]] = []
    recorder = Recorder(model, None, on_step=traces.append)
    with _untouched(model, recorder):
        report("measuring plain steps")
        _step(model, batches[0], loss)
        for number, batch in enumerate(batches):
            report("measuring plain steps", number, len(batches))
            # The same random numbers each time: the same path.
            runs = []
            for _ in range(_TIMED):
                with torch.random.fork_rng(devices=[]):
                    runs.append(_step(model, batch, loss))
            times.append((median(f for f, _ in runs), median(b for _, b in runs)))
            with recorder:
                _step(model, batch, loss)
    report("timing the optimizer")
    update_s = 0.0 if optimizer is None else _update_seconds(optimizer)
    network = network_of(model)
    states = _states(model, optimizer)
    steps = tuple(
        replace(recorded(trace, network), states=states).timed(*timed, update_s)
        for trace, timed in zip(traces, times, strict=True)
    )
    return Measured(network, steps, max(map(temporaries, traces)))


def _step(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[float, float]:
    """Return the seconds of forward and of backward."""
    begin = time.perf_counter()
    found = loss_of(call_model(model, batch), batch, loss)
    forward = time.perf_counter()
    found.backward()  # type: ignore[no-untyped-call]
    return forward - begin, time.perf_counter() - forward


@contextlib.contextmanager
def _untouched(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Leave ``model`` as it was; see [Note: gradients]."""
    gradients = [(one, one.grad) for one in model.parameters()]
    buffers = [(one, one.detach().clone()) for one in model.buffers()]

    def drop(parameter: torch.Tensor) -> None:
        recorder.note_gradient(parameter)
        parameter.grad = None

    handles = []
    with torch.random.fork_rng():
        try:
            for parameter, _ in gradients:
                parameter.grad = None
                if parameter.requires_grad:
                    handles.append(_on_gradient(parameter, drop))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def _on_gradient(parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def _states(model: nn.Module, optimizer: Optimizer | None) -> dict[int, dict[str, int]]:
    states = States(optimizer)
    return {
        number: {f"state {n}": nbytes for n, nbytes in enumerate(sizes)}
        for number, parameter in enumerate(model.parameters())
        if is_trained(parameter) and (sizes := states.sizes(parameter))
    }


def _update_seconds(optimizer: Optimizer) -> float:
    """Return the seconds of a step of ``optimizer``, from one of its kind over some tensors."""
    trained = [
        (number, one)
        for number, group in enumerate(optimizer.param_groups)
        for one in group["params"]
        if is_trained(one)
    ]
    whole: int = sum(one.nbytes for _, one in trained)
    if not whole:
        return 0.0
    stride = max(1, -(-whole // _UPDATED))
    chosen = trained[::stride] or trained[:1]
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    for number, one in chosen:
        like = torch.zeros(one.shape, dtype=one.dtype, requires_grad=True)
        like.grad = torch.full_like(like, 1e-3)
        groups[number]["params"].append(like)
    other = copy.copy(optimizer)  # options and all, hooks left out
    other.state = defaultdict(dict)
    other.param_groups = [group for group in groups if group["params"]]
    seconds = []
    try:
        for _ in range(_UPDATES):
            begin = time.perf_counter()
            other.step()
            seconds.append(time.perf_counter() - begin)
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"a step of {type(optimizer).__name__} over tensors like the model's cannot be timed "
            f"({error}): pass an optimizer whose step() needs nothing but gradients"
        ) from error
    share: float = sum(one.nbytes for _, one in chosen) / whole
    return median(seconds[1:]) / share
