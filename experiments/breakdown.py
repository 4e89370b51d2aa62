"""Where a step under a budget spends its time, part by part, beside a plain step.

What it is: the network of the paging benchmark, trained plain and then under a budget in one
process, with the runtime's main calls timed: each part without the parts that it calls. What it is
not: a measure of speed; the two runs do not take turns, and the timing itself costs a little.

A part that runs while the other core computes is time all the same; what is left over when all
parts are taken from the difference of the two steps is the rest: hooks' own work, colder caches,
and cores shared with the threads that move bytes.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dynoffload
from dynoffload.datasets.text import batches
from dynoffload.experiments import zoo
from dynoffload.memory import heap
from dynoffload.memory.mapped import MappedFile
from dynoffload.memory.pager import Pager
from dynoffload.pilot.progress import Report, progress_bar
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


def run(
    json_path: Path | None = None,
    *,
    preset: str = "base",
    tokens: int = 1024,
    budget: str = "1GB",
    policy: str = "repeat",
    steps: int = 6,
    warmup: int = 4,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Time the parts of a step.

    Args:
        json_path: not used; the numbers are written by the caller.
        preset: sizes of the MoE language model.
        tokens: per step.
        budget: of dynoffload.
        policy: of dynoffload.
        steps: measured steps of each run.
        warmup: steps before them.
        spill_dir: where the spill file lies.
    """

    def block(model: Any, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
        config = {"policy": policy, "step_aside": False}
        return dynoffload.offload(
            model, optimizer, budget=budget, pilot=None, spill_dir=spill_dir, config=config
        )

    kind = (preset, tokens, warmup, steps)
    with progress_bar(True) as report:
        plain, _ = _train(kind, report, "plain", lambda *_: contextlib.nullcontext())
        ours, parts = _train(kind, report, "under a budget", block)
    shares = {part: parts.get(part, 0.0) / steps for part in _PARTS}
    result: dict[str, Any] = {
        "preset": preset,
        "tokens": tokens,
        "budget": budget,
        "policy": policy,
        "losses_equal": [s.loss for s in plain] == [s.loss for s in ours],
        "plain": _medians(plain),
        "under_budget": _medians(ours),
        "parts_s": shares,
    }
    more = result["under_budget"]["seconds"] - result["plain"]["seconds"]
    result["more_s"] = more
    in_place = result["plain"]["optimizer_s"]  # the plain step makes these updates too
    result["rest_s"] = more - (sum(shares.values()) - in_place)
    _print(result)
    return result


def _train(
    kind: tuple[str, int, int, int],
    report: Report,
    name: str,
    block: Callable[[Any, Any], contextlib.AbstractContextManager[Any]],
) -> tuple[list[_Step], dict[str, float]]:
    """Train a fresh network in ``block``; return the measured steps, and their parts' seconds."""
    preset, tokens, warmup, steps = kind
    model = zoo.build("moe", preset, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    clock = _Clock()
    found: list[_Step] = []
    with _timing(clock), block(model, optimizer):
        samples = islice(batches("train", length=tokens, seed=0), warmup + steps)
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


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"a step of the MoE {result['preset']}, {result['tokens']} tokens, "
        f"fused AdamW, under {result['budget']}",
        caption="medians of a step, and means of the parts in it; CPU time is of all threads",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("under a budget", justify="right")
    plain, ours = result["plain"], result["under_budget"]
    for name in ("seconds", "forward_s", "backward_s", "optimizer_s", "user_s", "system_s"):
        label = {"seconds": "step", "user_s": "CPU, user", "system_s": "CPU, system"}.get(name)
        table.add_row(
            label or name.removesuffix("_s"), *(format_seconds(r[name]) for r in (plain, ours))
        )
    table.add_row("page faults", *(f"{int(r['page_faults']):,}" for r in (plain, ours)))
    table.add_section()
    for part, seconds in sorted(result["parts_s"].items(), key=lambda item: -item[1]):
        table.add_row(part, "", format_seconds(seconds))
    table.add_row("rest", "", f"{result['rest_s']:+.3f} s")
    Console().print(table)
