"""Measures plain steps of a network without training it.

`measure` runs forward and backward on a few batches, records and times them; `update_seconds` times
an optimizer on tensors like the model's. Weights, buffers, gradients and the random states of
torch, numpy and Python are restored afterwards. Post-accumulate-gradient hooks are not called.

[Note: gradients]  Each gradient is dropped as soon as it is complete, so that a model of which only
one layer fits in memory can be measured.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError, DynOffloadError
from dynoffload.memory.pieces import same_bits
from dynoffload.pilot.progress import Report
from dynoffload.planning.footprint import temporaries
from dynoffload.profiler.profiling import call_model, loss_of
from dynoffload.profiler.recorder import Recorder
from dynoffload.profiler.trace import Trace
from dynoffload.runtime.counting import States, is_trained
from dynoffload.simulation.recorded import Network, Recorded, network_of, recorded
from dynoffload.units import MiB

Loss = Callable[[Any, Any], torch.Tensor]

_TIMED = 5  # timed runs of each batch
_UPDATED, _PART = 64 * MiB, 16 * MiB  # most bytes of parameters, and of one, to time an optimizer
_UPDATES = 4  # timed updates, of which the first creates the state


@dataclass(frozen=True)
class Measured:
    """Measurements of plain steps.

    Attributes:
        network: its parameters and their owners.
        steps: the recorded steps, with the times of plain ones.
        temporaries: peak bytes, in any step, of the activations that are not saved.
        spread: the quartiles of the repeats of a step, as shares of their median.
    """

    network: Network
    steps: tuple[Recorded, ...]
    temporaries: int
    spread: tuple[float, float] = (1.0, 1.0)

    @property
    def seconds(self) -> float:
        """Mean seconds of a plain step."""
        return sum(sum(step.seconds) for step in self.steps) / len(self.steps)

    @property
    def saved_bytes(self) -> int:
        """Most bytes that a step saves for backward."""
        return max(step.saved_bytes for step in self.steps)


def measure(
    model: nn.Module, batches: Sequence[Any], loss: Loss | None, report: Report
) -> Measured:
    """Measure plain steps, one of each batch, without their updates.

    Args:
        model: a model that can compute; for the meta device see `dynoffload.estimation.hollow`.
        batches: at least one.
        loss: as for `dynoffload.profile`.
        report: receives progress.

    Raises:
        ConfigError: there is no batch, one can be used only once, the model fails on one, or
            forward writes into weights.
        TraceError: a batch gives no loss.
    """
    if not batches:
        raise ConfigError("no batch to measure a step of: pass at least one")
    if any(isinstance(batch, Iterator) for batch in batches):
        raise ConfigError("a batch is an iterator, which can be used only once: pass tensors")
    traces: list[Trace] = []
    times: list[tuple[float, float]] = []
    repeats: list[list[float]] = []
    recorder = Recorder(model, None, on_step=traces.append)
    with _untouched(model, recorder):
        report("measuring plain steps")
        versions = {name: one._version for name, one in model.named_parameters()}
        _step(model, batches, 0, loss)
        for name, one in model.named_parameters():
            if one._version != versions.get(name, one._version):
                raise ConfigError(
                    f"forward writes into {name}, so no step can be measured without changing it: "
                    "it has been changed by one"
                )
        for number in range(len(batches)):
            report("measuring plain steps", number, len(batches))
            runs = []
            for _ in range(_TIMED):
                with torch.random.fork_rng(devices=[]):  # the same control flow each time
                    runs.append(_step(model, batches, number, loss))
            repeats.append(sorted(f + b for f, b in runs))
            times.append((median(f for f, _ in runs), median(b for _, b in runs)))
            with recorder:
                _step(model, batches, number, loss)
    network = network_of(model)
    steps = tuple(
        recorded(trace, network).timed(*timed, 0.0)
        for trace, timed in zip(traces, times, strict=True)
    )
    middle = sum(median(totals) for totals in repeats)
    lower, upper = (sum(totals[at] for totals in repeats) / middle for at in (1, -2))
    return Measured(network, steps, max(map(temporaries, traces)), (lower, upper))


def _step(
    model: nn.Module, batches: Sequence[Any], number: int, loss: Loss | None
) -> tuple[float, float]:
    """Return the seconds of forward and of backward on one of ``batches``.

    Raises:
        ConfigError: the model or the loss function fails on it.
        TraceError: it gives no loss.
    """
    batch, what = batches[number], "forward"
    try:
        begin = time.perf_counter()
        output = call_model(model, batch, some=loss is not None)
        what = "forward" if loss is None else "the loss function"
        found = loss_of(output, batch, loss)
        forward, what = time.perf_counter(), "backward"
        torch.autograd.backward(found)
    except DynOffloadError:
        raise
    except Exception as error:
        hint = ""
        if isinstance(error, TypeError):  # most likely arguments
            hint = (
                "; a batch is given to forward by name if it is a mapping, by position if it is a "
                "tuple or list, and else as the one argument; a loss function is given forward's "
                "output and the batch"
            )
        raise ConfigError(
            f"{what} of {type(model).__name__} failed on batch {number} "
            f"({type(error).__name__}: {error}): mend the model, the batches or the loss{hint}"
        ) from error
    return forward - begin, time.perf_counter() - forward


@contextlib.contextmanager
def _untouched(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Restore ``model`` afterwards; drop gradients as [Note: gradients] says."""
    parameters = list(model.parameters())
    gradients = [(one, one.grad) for one in parameters]
    places: list[tuple[dict[Any, Any], dict[Any, Any]]]
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    contents = [(one, one._version, one.detach().clone()) for one in model.buffers()]
    live = [h for one in parameters if (h := one._post_accumulate_grad_hooks)]
    places += [(hooks, dict(hooks)) for hooks in live]

    def drop(parameter: torch.Tensor) -> None:
        recorder.note_gradient(parameter)
        parameter.grad = None

    handles = []
    with same_random():
        try:
            for hooks in live:
                hooks.clear()
            for parameter, _ in gradients:
                parameter.grad = None
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    handles.append(register(drop))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for now, there in places:
                now.clear()
                now.update(there)
            with torch.no_grad():
                for buffer, version, content in contents:
                    if buffer.layout is torch.strided:  # batch norm writes without a new version
                        same = same_bits(buffer, content)
                    else:
                        same = buffer._version == version
                    if not same:
                        buffer.copy_(content)


@contextlib.contextmanager
def same_random() -> Iterator[None]:
    """Restore the random states of torch, numpy and Python afterwards."""
    python, theirs = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(theirs)


def states_of(model: nn.Module, optimizer: Optimizer | None) -> dict[int, dict[str, int]]:
    """Return the bytes of each parameter's optimizer state tensors, by the parameter's number."""
    states = States(optimizer)
    return {
        number: {f"state {n}": nbytes for n, nbytes in enumerate(sizes)}
        for number, parameter in enumerate(model.parameters())
        if is_trained(parameter) and (sizes := states.sizes(parameter))
    }


def update_seconds(optimizer: Optimizer) -> float:
    """Return the estimated seconds of a step of ``optimizer``, scaled by the parameters' bytes.

    A copy of it is timed on tensors like some of the parameters, or like parts of large ones: at
    most 64 MiB of them, and as much again for each of gradients and states.

    Raises:
        ConfigError: its step needs more than gradients.
    """
    trained = [
        (number, one)
        for number, group in enumerate(optimizer.param_groups)
        for one in group["params"]
        if is_trained(one) and one.numel()
    ]
    whole: int = sum(one.nbytes for _, one in trained)
    if not whole:
        return 0.0
    likes = [(number, _part_of(one)) for number, one in trained]
    stride = -(-sum(like.nbytes for _, like in likes) // _UPDATED)
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    taken = 0
    for number, like in likes[::stride]:
        if taken and taken + like.nbytes > _UPDATED:
            break
        made = torch.zeros(like.shape, dtype=like.dtype, requires_grad=True)
        made.grad = torch.full_like(made, 1e-3)
        groups[number]["params"].append(made)
        taken += like.nbytes
    other = copy.copy(optimizer)  # with its options, without its hooks
    for key, value in vars(optimizer).items():
        if not callable(value):  # a scheduler's wrapper of step() would step the original
            vars(other).setdefault(key, value)
    other.state = defaultdict(dict)
    other.param_groups = [group for group in groups if group["params"]]
    seconds = []
    try:
        with same_random():
            for _ in range(_UPDATES):
                begin = time.perf_counter()
                other.step()
                seconds.append(time.perf_counter() - begin)
    except Exception as error:
        raise ConfigError(
            f"a step of {type(optimizer).__name__} over tensors like the model's cannot be timed "
            f"({type(error).__name__}: {error}): pass an optimizer whose step() needs nothing but "
            "gradients"
        ) from error
    return median(seconds[1:]) * (whole / taken)


def _part_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor like ``parameter``, or like its first rows if it is large."""
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    if like.nbytes <= _PART:
        return like
    if like.nbytes // len(like) > _PART:  # its rows are large too
        return like.flatten()[: _PART // like.element_size()]
    return like[: _PART // (like.nbytes // len(like))]
