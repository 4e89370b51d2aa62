"""One training for `dynoffload.experiments.simulation`: plainly, under a budget, or for a pilot.

Each function builds its task's network and makes its steps, in its own process.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from dynoffload.experiments.networks import NETWORKS
from dynoffload.experiments.processes import NEVER_LEFT
from dynoffload.experiments.simulation_fit import PHASES
from dynoffload.experiments.trainer import Trainer
from dynoffload.experiments.ways import BUDGETED, Spec, adamw

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

    @property
    def spec(self) -> Spec:
        """Its plain training."""
        return Spec(self.network, "", spill_dir=self.spill_dir or None)


def _timed(task: Task) -> list[list[float]]:
    """Return the seconds of forward, backward and optimizer of each step of a plain training."""
    trainer = Trainer(task.spec)
    with trainer.training():
        made = [trainer.step() for _ in range(task.steps)]
    return [[step[key] for key in PHASES] for step in made]


def plain(task: Task) -> dict[str, Any]:
    """Train plainly and save traces; return step times, predicted orders, and the network."""
    from dynoffload.pilot.pilot import Pilot
    from dynoffload.profiler.profiling import file_of_step
    from dynoffload.profiler.recorder import Recorder
    from dynoffload.profiler.storage import save_trace
    from dynoffload.runtime.adoption.units import Unit
    from dynoffload.runtime.migration.forecast import Forecast
    from dynoffload.simulation.recorded import network_of

    runs = [_timed(task) for _ in range(_TIMED)]
    times = [
        [median(parts) for parts in zip(*each, strict=True)] for each in zip(*runs, strict=True)
    ]
    kind = NETWORKS[task.network]()
    model = kind.build()
    network = network_of(model)
    modules = dict(model.named_modules())
    units = [Unit(n, path, modules[path], ()) for n, path in enumerate(network.owners)]
    optimizer, folder, orders = adamw(model, task.spec), Path(task.folder), list[Any]()
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

    found = _timed(task)
    pace = probe_overhead(task.spill_dir or default_spill_dir())
    return {"times": found, "pace_s": pace.seconds}


def budgeted(task: Task) -> dict[str, Any]:
    """Train under a budget; return each step's statistics, and how the budget is divided."""
    config = {"policy": task.policy, "step_aside": False}
    pilot = task.pilot or None
    trainer = Trainer(
        replace(task.spec, mode=BUDGETED, budget=task.budget, pilot=pilot, config=config)
    )
    NEVER_LEFT.enter_context(trainer.training())
    made, session = [trainer.step() for _ in range(task.steps)], trainer.session
    counts = ("stall_s", "bytes_in", "bytes_out", "prefetched_bytes")
    rows = [
        {key: step[key] for key in ("seconds", *PHASES)}
        | {key: step["stats"][key] for key in counts}
        for step in made
    ]
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

    folder, kind = Path(task.folder), NETWORKS[task.network]()
    model = kind.build()
    samples = list(itertools.islice(kind.samples(1), _LEARNED))
    profile(model, samples, out=folder, optimizer=adamw(model, task.spec), progress=False)
    path = folder / "trained.pilot"
    train_pilot(folder, progress=False).pilot.save(path)
    return str(path)
