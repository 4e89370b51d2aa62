"""Measures the runtime's pace: how fast its own work runs on this machine now.

`probe_overhead` trains a small network that fits in the budget, alternating plain steps and steps
in a session. The difference is the runtime's own work. Callers use it to scale fitted costs to
this machine.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from dynoffload.config import without_defaults
from dynoffload.errors import BackendError
from dynoffload.estimation.measuring import same_random
from dynoffload.runtime.offload import offload
from dynoffload.units import format_seconds

_LAYERS, _WIDTH, _ROWS = 20, 192, 48
_BUDGET = 3  # times parameters, gradients and optimizer state
_STEPS, _WARMUP, _ROUNDS = 9, 3, 3


class OverheadProbe(NamedTuple):
    """The runtime's own work in a step of the small network.

    Attributes:
        seconds: difference of the medians of several steps.
        least, most: extremes of the rounds, as shares of ``seconds``.
    """

    seconds: float
    least: float
    most: float


def probe_overhead(directory: str | Path) -> OverheadProbe:
    """Return the seconds of the runtime's own work in a step of a network of 20 layers, with the
    process's number of threads; takes about two seconds and 50 MiB.

    Args:
        directory: a directory on a disk for the spill file; the file is removed.

    Raises:
        BackendError: the system supports no backend, or is so busy that a session's steps take no
            longer than plain ones.
        SpillError: the directory cannot be used.
    """
    with same_random(), torch.enable_grad(), torch.device("cpu"), without_defaults():
        return _measured(directory)


def _measured(directory: str | Path) -> OverheadProbe:
    layers = ((nn.Linear(_WIDTH, _WIDTH, dtype=torch.float32), nn.ReLU()) for _ in range(_LAYERS))
    model = nn.Sequential(*itertools.chain.from_iterable(layers))
    batch = torch.randn(_ROWS, _WIDTH, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = _BUDGET * 4 * sum(one.nbytes for one in model.parameters())
    plain, paged = list[float](), list[float]()
    rounds = []
    for _ in range(_ROUNDS):
        plain += _steps(model, optimizer, batch)
        with offload(
            model,
            optimizer,
            budget=budget,
            config={"policy": "repeat", "step_aside": False},
            spill_dir=directory,
        ):
            paged += _steps(model, optimizer, batch)
        count = _STEPS - _WARMUP
        rounds.append(max(0.0, median(paged[-count:]) - median(plain[-count:])))
    own = median(paged) - median(plain)
    if own <= 0:
        raise BackendError(
            f"a step took {format_seconds(median(paged))} in a session and "
            f"{format_seconds(median(plain))} plainly, so dynoffload's overhead cannot be "
            "measured: the machine is too busy, estimate again when it is idle"
        )
    return OverheadProbe(own, min(1.0, min(rounds) / own), max(1.0, max(rounds) / own))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> list[float]:
    """Return the seconds of each step after the warm-up."""
    taken = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - begin)
    return taken[_WARMUP:]
