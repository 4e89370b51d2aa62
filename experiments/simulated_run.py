"""One training for `dynoffload.experiments.simulation`: plainly, under a budget, or for a pilot.

Each function builds its task's network and makes its steps, in its own process.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.networks import NETWORKS, Sample, Subject
from dynoffload.experiments.processes import NEVER_LEFT

if TYPE_CHECKING:
    from torch import nn

_LEARNED = 48
_TIMED = 3  # timed plain trainings; each step's median is used


@dataclass(frozen=True)
class Task:
    """Task of one process.

    Attributes:
        network: a key of `dynoffload.experiments.networks.NETWORKS`.
        steps: number of steps.
        folder: for traces or the pilot.
        budget: bytes.
        policy: of the session.
        pilot: path of a pilot, "" for none.
        spill_dir: of the spill file, "" for the default.
    """

    network: str
    steps: int
    folder: str = ""
    budget: int = 0
    policy: str = "repeat"
    pilot: str = ""
    spill_dir: str = ""

    def kind(self) -> Subject:
        """Return its network."""
        return NETWORKS[self.network]()


def adamw(model: nn.Module) -> Any:
    """Return the optimizer that all these trainings use."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _timed(kind: Subject, steps: int) -> list[tuple[float, float, float]]:
    """Return the seconds of forward, backward and optimizer of each step of a plain training."""
    model = kind.build()
    optimizer, times = adamw(model), []
    for sample in itertools.islice(kind.samples(0), steps):
        times.append(_step(model, optimizer, sample))
    return times


def _step(model: nn.Module, optimizer: Any, sample: Sample) -> tuple[float, float, float]:
    """Return the seconds of forward, backward and optimizer."""
    begin = time.perf_counter()
    loss = sample.call(model)
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    return forward - begin, backward - forward, time.perf_counter() - backward


def plain(task: Task) -> dict[str, Any]:
    """Train plainly and save traces; return step times, predicted orders, and the network."""
    from statistics import median

    from dynoffload.pilot.pilot import Pilot
    from dynoffload.profiler.profiling import file_of_step
    from dynoffload.profiler.recorder import Recorder
    from dynoffload.profiler.storage import save_trace
    from dynoffload.runtime.adoption.units import Unit
    from dynoffload.runtime.migration.forecast import Forecast
    from dynoffload.simulation.recorded import network_of

    kind = task.kind()
    runs = [_timed(kind, task.steps) for _ in range(_TIMED)]
    times = [
        [median(parts) for parts in zip(*each, strict=True)] for each in zip(*runs, strict=True)
    ]
    model = kind.build()
    network = network_of(model)
    modules = dict(model.named_modules())
    units = [Unit(n, path, modules[path], ()) for n, path in enumerate(network.owners)]
    optimizer, folder, orders = adamw(model), Path(task.folder), list[Any]()
    forecast = Forecast(model, "pilot", Pilot.load(Path(task.pilot)) if task.pilot else None, None)
    forecast.watch(units)
    count = itertools.count()
    on_step = lambda trace: save_trace(trace, file_of_step(folder, next(count)))  # noqa: E731
    with Recorder(model, optimizer, on_step=on_step):
        for sample in itertools.islice(kind.samples(0), task.steps):
            order = forecast.begin(sample.args, sample.kwargs)
            orders.append(None if order is None else [unit.path for unit in order])
            loss = sample.call(model)
            forecast.end()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    forecast.unwatch()
    return {"times": times, "orders": orders, "network": asdict(network)}


def timed(task: Task) -> dict[str, Any]:
    """Train plainly for step times only, and measure the runtime's overhead pace."""
    from dynoffload.estimation.overhead_probe import probe_overhead
    from dynoffload.memory.spill import default_spill_dir

    found = _timed(task.kind(), task.steps)
    pace = probe_overhead(task.spill_dir or default_spill_dir())
    return {"times": found, "pace_s": pace.seconds}


def budgeted(task: Task) -> dict[str, Any]:
    """Train under a budget; return each step's statistics, and how the budget is divided."""
    import dynoffload

    kind = task.kind()
    model = kind.build()
    optimizer, rows = adamw(model), []
    block = dynoffload.offload(
        model,
        optimizer,
        budget=task.budget,
        pilot=task.pilot or None,
        config={"policy": task.policy, "step_aside": False},
        spill_dir=task.spill_dir or None,
    )
    session = NEVER_LEFT.enter_context(block)
    for sample in itertools.islice(kind.samples(0), task.steps):
        forward, backward, rest = _step(model, optimizer, sample)
        stats = session.log.steps[-1]
        rows.append(
            {
                "seconds": forward + backward + rest,
                "forward_s": forward,
                "backward_s": backward,
                "optimizer_s": rest,
                "stall_s": stats.stall_s,
                "bytes_in": stats.bytes_in,
                "bytes_out": stats.bytes_out,
                "prefetched_bytes": stats.prefetched_bytes,
            }
        )
    waits = [
        (one.end - one.start, one.nbytes)
        for one in session.log.transfers
        if one.kind == "fetch" and one.cause == "fault" and one.nbytes
    ]
    sizing = asdict(session.sizing)
    return {"steps": rows, "sizing": sizing, "backend": session.backend, "fetches": waits}


def pilot(task: Task) -> str:
    """Record steps on other samples, train a pilot into the task's folder, and return its path."""
    from dynoffload.pilot.train import train_pilot
    from dynoffload.profiler import profile

    folder, kind = Path(task.folder), task.kind()
    model = kind.build()
    samples = list(itertools.islice(kind.samples(1), _LEARNED))
    profile(model, samples, out=folder, optimizer=adamw(model), progress=False)
    path = folder / "trained.pilot"
    train_pilot(folder, progress=False).pilot.save(path)
    return str(path)
