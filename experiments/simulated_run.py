"""One training for `dynoffload.experiments.simulation`: plainly, under a budget, or for a pilot.

What it is: ``python -m dynoffload.experiments.simulated_run TASK``, a process that builds one
network, makes the steps that its task names, and prints what it found as one JSON object. What it
is not: a simulation; it only runs, and records.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

PLAIN, BUDGETED, PILOT = "plain", "budgeted", "pilot"
_LEARNED = 48
_TIMED = 3  # plain trainings whose times are recorded, of which each step's median counts


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        network: a key of `NETWORKS`, or what messages call ``zoo``.
        mode: one of `PLAIN`, `BUDGETED` and `PILOT`.
        steps: how many.
        folder: where traces go, or the pilot.
        budget: bytes.
        policy: of the session.
        pilot: path of a pilot, "" for none.
        spill_dir: where the spill file lies, "" for the default.
        zoo: ``network``, ``preset``, ``sizes`` and ``shape`` of a network that is no key, as `Spec`
            has them.
        learned: recorded steps that a pilot learns from.
    """

    network: str
    mode: str
    steps: int
    folder: str = ""
    budget: int = 0
    policy: str = "repeat"
    pilot: str = ""
    spill_dir: str = ""
    zoo: Mapping[str, Any] = field(default_factory=dict)
    learned: int = _LEARNED

    def kind(self) -> Kind:
        """Return its network."""
        if not self.zoo:
            return NETWORKS[self.network]()
        of = self.zoo
        return zoo_kind(of["network"], of["preset"], of["shape"], **of["sizes"])


@dataclass(frozen=True)
class Sample:
    """The arguments of one forward."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def call(self, model: nn.Module) -> Any:
        """Return the loss."""
        return model(*self.args, **self.kwargs).loss


@dataclass(frozen=True)
class Kind:
    """A network with its samples.

    Attributes:
        build: makes it, always with the same weights.
        samples: yields its samples for a seed.
    """

    build: Callable[[], nn.Module]
    samples: Callable[[int], Iterator[Sample]]


def zoo_kind(name: str, preset: str, shape: Mapping[str, int], **sizes: int) -> Kind:
    """Return a network of the zoo; ``shape`` is its samples', ``sizes`` are its configuration's."""
    from dynoffload.experiments import zoo

    def samples(seed: int) -> Iterator[Sample]:
        split = "train" if seed else "held-out"
        for one in zoo.samples(name, split, seed=seed, **shape):
            yield Sample(one.args, source=one.source)

    return Kind(lambda: zoo.build(name, preset, **sizes), samples)


def _t5(length: int, **sizes: int) -> Kind:
    import torch

    def build() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        config = T5Config(vocab_size=512, decoder_start_token_id=0, pad_token_id=0, **sizes)
        model: nn.Module = T5ForConditionalGeneration(config)
        return model.train()

    def samples(seed: int) -> Iterator[Sample]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            source, target = torch.randint(3, 512, (2, 1, length), generator=generator)
            yield Sample(kwargs={"input_ids": source, "labels": target})

    return Kind(build, samples)


_TEXT = {"rows": 1, "length": 24}
_TREES = {"max_nodes": 40}

NETWORKS: dict[str, Callable[[], Kind]] = {
    "moe": lambda: zoo_kind("moe", "tiny", _TEXT, hidden=256, width=512, layers=4),
    "tree": lambda: zoo_kind("tree", "tiny-untied", _TREES, hidden=320, embedding=160),
    # Slices of 172.5 and 86.25 KiB are no whole pages, so experts are paged whole.
    "mixtral": lambda: zoo_kind("fused", "tiny", _TEXT, hidden=120, width=184, layers=12),
    "t5": lambda: _t5(32, d_model=256, d_kv=32, d_ff=1024, num_layers=6, num_heads=8),
    "mixtral (fit)": lambda: zoo_kind("fused", "tiny", _TEXT, hidden=104, width=168, layers=10),
    "moe (fit)": lambda: zoo_kind("moe", "tiny", _TEXT, hidden=192, width=640, layers=5, experts=6),
    "tree (fit)": lambda: zoo_kind("tree", "tiny-untied", _TREES, hidden=256, embedding=256),
    "t5 (fit)": lambda: _t5(24, d_model=320, d_kv=40, d_ff=640, num_layers=4, num_heads=8),
}
"""By name; those to fit are other networks than those to validate by."""


def adamw(model: nn.Module) -> Any:
    """Return the optimizer of all these trainings."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _timed(kind: Kind, steps: int) -> list[tuple[float, float, float]]:
    """Return the seconds of forward, backward and optimizer of each step of a plain training."""
    model = kind.build()
    optimizer, times = adamw(model), []
    for sample in itertools.islice(kind.samples(0), steps):
        begin = time.perf_counter()
        loss = sample.call(model)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        times.append((forward - begin, backward - forward, time.perf_counter() - backward))
    return times


def plain(task: Task, kind: Kind) -> dict[str, Any]:
    """Train plainly: its times, its traces, and what a pilot, or the last order, predicts."""
    from statistics import median

    from dynoffload.pilot.pilot import Pilot
    from dynoffload.profiler.recorder import Recorder
    from dynoffload.runtime.adoption.units import Unit
    from dynoffload.runtime.migration.forecast import Forecast
    from dynoffload.simulation.recorded import network_of

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
    on_step = lambda trace: trace.save(folder / f"step-{next(count):06d}.parquet")  # noqa: E731
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


def budgeted(task: Task, kind: Kind) -> dict[str, Any]:
    """Train under a budget: each step's numbers, and how the budget is divided."""
    import dynoffload

    model = kind.build()
    optimizer, rows = adamw(model), []
    with dynoffload.offload(
        model,
        optimizer,
        budget=task.budget,
        pilot=task.pilot or None,
        config={"policy": task.policy, "step_aside": False},
        spill_dir=task.spill_dir or None,
    ) as session:
        for sample in itertools.islice(kind.samples(0), task.steps):
            begin = time.perf_counter()
            loss = sample.call(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - begin
            stats = session.log.steps[-1]
            rows.append(
                {
                    "seconds": seconds,
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
        answer = {
            "steps": rows,
            "sizing": asdict(session.sizing),
            "backend": session.backend,
            "fetches": waits,
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        os._exit(0)  # nobody looks at the restored tensors
    raise AssertionError("a session suppresses no error")


def pilot(task: Task, kind: Kind) -> dict[str, Any]:
    """Record steps on other samples and train a pilot into the task's folder."""
    from dynoffload.pilot.train import train_pilot
    from dynoffload.profiler import profile

    folder, model = Path(task.folder), kind.build()
    samples = list(itertools.islice(kind.samples(1), task.learned))
    profile(model, samples, out=folder, optimizer=adamw(model), progress=False)
    path = folder / "trained.pilot"
    train_pilot(folder, progress=False).pilot.save(path)
    return {"pilot": str(path)}


def main() -> None:
    """Carry out the task of the command line."""
    import torch

    torch.set_num_threads(1)
    task = Task(**json.loads(sys.argv[1]))
    work = {PLAIN: plain, BUDGETED: budgeted, PILOT: pilot}[task.mode]
    answer = work(task, task.kind())
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
