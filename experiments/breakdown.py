"""Where a step under a budget spends its time, part by part, beside a plain step.

The network of the paging benchmark is trained plain and then under a budget, in one process, with
the runtime's main calls timed: each part without the parts that it calls. The two runs do not take
turns, so this is no measure of speed. The rest is what the parts do not explain of the difference:
hooks' own work, colder caches, and cores shared with the threads that move bytes.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dynoffload
from dynoffload.datasets.text import batches
from dynoffload.experiments import zoo
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, option
from dynoffload.memory import heap
from dynoffload.memory.mapped import MappedFile
from dynoffload.memory.pager import Pager
from dynoffload.pilot.progress import Report
from dynoffload.runtime.adoption.store import Store
from dynoffload.runtime.migration.migrator import Migrator
from dynoffload.runtime.passes.activations import Activations
from dynoffload.runtime.recording import Recording
from dynoffload.runtime.updates.pending import PendingUpdates
from dynoffload.runtime.updates.runner import UpdateRunner
from dynoffload.runtime.updates.speculative import SpeculativeUpdates
from dynoffload.units import format_seconds

_UPDATES = "the optimizer's own updates"
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    _UPDATES: ((UpdateRunner, "run"),),
    "gradients into their regions": ((Store, "adopt_gradient"), (Store, "end_gradient")),
    "updates drafted in backward, besides": (
        (SpeculativeUpdates, "make"),
        (SpeculativeUpdates, "take"),
    ),
    "updates put off, besides": ((PendingUpdates, "flush"),),
    "saved activations, moved": ((Activations, "pack"),),
    "saved activations, given back": ((Activations, "unpack"),),
    "waiting for regions, or making them present": (
        *((device, name) for device in (Pager, MappedFile) for name in ("acquire", "touch")),
    ),
    "plans": (
        *((Migrator, name) for name in ("visit", "backward_use", "begin_forward", "end_forward")),
        *((device, name) for device in (Pager, MappedFile) for name in ("follow", "advance")),
    ),
    "samples of memory": ((Recording, "sample"),),
    "freed heap, handed back": ((heap, "give_back"),),
}


class _Clock:
    """Adds up the seconds of parts, each without those that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` as it is, timed as ``part``."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                whole = time.perf_counter() - start
                self.seconds[part] += whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole

        return run


@contextlib.contextmanager
def _timing(clock: _Clock) -> Iterator[None]:
    """Time the runtime's parts by ``clock`` while this is open."""
    with contextlib.ExitStack() as undo:
        for part, calls in _PARTS.items():
            for owner, name in calls:
                was = getattr(owner, name)
                undo.callback(setattr, owner, name, was)
                setattr(owner, name, clock.timed(part, was))
        yield


@dataclass(frozen=True)
class _Step:
    forward_s: float
    backward_s: float
    optimizer_s: float
    user_s: float
    system_s: float
    page_faults: int
    loss: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class Params:
    """What is timed."""

    preset: str = option("base", "sizes of the MoE language model")
    tokens: int = option(1024, "per step")
    budget: str = option("1GB", "of dynoffload")
    policy: str = option("repeat", "of dynoffload")
    steps: int = option(6, "measured steps of each run")
    warmup: int = option(4, "steps before them")
    spill_dir: Path | None = option(None, "where the spill file lies", place=True)


class Breakdown(Experiment[Params]):
    """The one case is the network, plain and under the budget."""

    parameters = Params

    def cases(self) -> Mapping[str, str]:
        return {"moe": "moe"}

    def run(self, case: str) -> Row:
        def block(model: Any, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
            return dynoffload.offload(
                model,
                optimizer,
                budget=self.params.budget,
                pilot=None,
                spill_dir=self.params.spill_dir,
                config={"policy": self.params.policy, "step_aside": False},
            )

        plain, _ = _train(self.params, self.report, "plain", lambda *_: contextlib.nullcontext())
        ours, parts = _train(self.params, self.report, "under a budget", block)
        shares = {part: parts.get(part, 0.0) / self.params.steps for part in _PARTS}
        before, after = _medians(plain), _medians(ours)
        more = after["seconds"] - before["seconds"]
        in_place = before["optimizer_s"]  # the plain step makes these updates too
        return {
            "losses_equal": [s.loss for s in plain] == [s.loss for s in ours],
            "plain": before,
            "under_budget": after,
            "parts_s": shares,
            "more_s": more,
            "rest_s": more - (sum(shares.values()) - in_place),
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        (row,) = result["rows"]
        plain, ours = row["plain"], row["under_budget"]
        rows = [
            [name.removesuffix("_s"), *(format_seconds(one[name]) for one in (plain, ours))]
            for name in plain
            if name != "page_faults"
        ]
        rows.append(["page faults", *(f"{int(one['page_faults']):,}" for one in (plain, ours))])
        parts = sorted(row["parts_s"].items(), key=lambda item: -item[1])
        rows += [[part, "", format_seconds(seconds)] for part, seconds in parts]
        rows.append(["rest", "", f"{row['rest_s']:+.3f} s"])
        title = "medians of a step, and means of the parts in it; CPU time is of all threads"
        return [Table(title, ["", "plain", "under a budget"], rows)]


def _train(
    params: Params,
    report: Report,
    name: str,
    block: Callable[[Any, Any], contextlib.AbstractContextManager[Any]],
) -> tuple[list[_Step], dict[str, float]]:
    """Train a fresh network in ``block``; return the measured steps, and their parts' seconds."""
    warmup, steps = params.warmup, params.steps
    model = zoo.build("moe", params.preset, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    clock = _Clock()
    found: list[_Step] = []
    with _timing(clock), block(model, optimizer):
        samples = islice(batches("train", length=params.tokens, seed=0), warmup + steps)
        for number, batch in enumerate(samples):
            if number == warmup:
                clock.seconds.clear()
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            loss = model(batch.tokens, batch.targets).loss
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            if number >= warmup:
                found.append(
                    _Step(
                        forward_s=forward - start,
                        backward_s=backward - forward,
                        optimizer_s=end - backward,
                        user_s=after.ru_utime - before.ru_utime,
                        system_s=after.ru_stime - before.ru_stime,
                        page_faults=after.ru_minflt - before.ru_minflt,
                        loss=loss.item(),
                    )
                )
            report(name, number + 1, warmup + steps)
        parts = dict(clock.seconds)  # what comes after belongs to no step
    return found, parts


def _medians(steps: list[_Step]) -> dict[str, float]:
    names = ("forward_s", "backward_s", "optimizer_s", "user_s", "system_s", "page_faults")
    return {
        "seconds": median(step.seconds for step in steps),
        **{name: median(getattr(step, name) for step in steps) for name in names},
    }
