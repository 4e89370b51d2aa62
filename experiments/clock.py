"""Times the parts of a session's own work, and counts its bytes by kind, in a training process.

Methods of the runtime are wrapped for this measurement only. A part's time is exclusive: what an
inner part takes is not counted twice. The wrappers themselves add about a microsecond a call.
"""

from __future__ import annotations

import functools
import importlib
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from dynoffload.telemetry import Transfer

_RUNTIME = "dynoffload.runtime"
_METHODS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "visits": [
        ("stepping", "Stepping", ("_visit", "_backward_use", "_end_experts")),
        ("migration.forecast", "Forecast", ("_enter", "_enter_experts")),
    ],
    "saving": [("passes.activations", "Activations", ("pack", "unpack"))],
    "gradients": [("stepping", "Stepping", ("_collect",))],
    "updates": [
        ("updates.pending", "PendingUpdates", ("_flush",)),
        ("updates.deferred_optimizer", "DeferredOptimizer", ("_before",)),
        ("updates.in_backward", "InBackward", ("collect",)),
    ],
    "planning": [("migration.migrator", "Migrator", ("_follow", "revise"))],
    "prediction": [("migration.forecast", "Forecast", ("begin", "end", "_ask", "_revise"))],
    "records": [
        ("recording", "Recording", ("end_step", "sample", "look_at_heap")),
        ("budgeted", "BudgetedSession", ("_before_forward", "_after_forward")),
    ],
}
PARTS = tuple(_METHODS)
"""Parts of a session's own work."""
EVENTS = {"visit": "_visit", "pack": "pack", "gradient": "_collect"}
"""Events of which the median is reported, and their methods."""
KINDS = ("parameter", "gradient", "state", "activation")
"""Kinds of bytes moved."""


class Clock:
    """Times one process's sessions from now on."""

    def __init__(self) -> None:
        self._own: dict[str, float] = defaultdict(float)  # part -> seconds since `take`
        self._events: dict[str, list[float]] = defaultdict(list)
        self._inner = [0.0]  # seconds of inner parts, by nesting depth
        self._cpu = _cpu()
        for part, places in _METHODS.items():
            for module, name, methods in places:
                cls = getattr(importlib.import_module(f"{_RUNTIME}.{module}"), name)
                for method in methods:
                    setattr(cls, method, self._timed(part, getattr(cls, method)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        events = self._events[method.__name__] if method.__name__ in EVENTS.values() else None

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                own = took - self._inner.pop()
                self._inner[-1] += took
                self._own[part] += own
                if events is not None:
                    events.append(own)

        return call

    def take(self, transfers: Iterable[Transfer]) -> dict[str, Any]:
        """Return what was measured since the last call, with the bytes of ``transfers``."""
        kinds = dict.fromkeys(KINDS, 0)
        for one in transfers:
            kinds[_kind(one.region)] += one.nbytes
        before, self._cpu = self._cpu, _cpu()
        found = {
            "parts_s": {part: self._own[part] for part in PARTS},
            "events_s": {
                name: median(times) if (times := self._events[method]) else None
                for name, method in EVENTS.items()
            },
            "kinds": kinds,
            "cpu_s": [now - was for now, was in zip(self._cpu, before, strict=True)],
        }
        self._own.clear()
        for times in self._events.values():
            times.clear()
        return found


def _cpu() -> tuple[float, float]:
    """Return the processor time of this thread, and of the process's other threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own = time.thread_time()
    return own, usage.ru_utime + usage.ru_stime - own


def _kind(region: str) -> str:
    if region.startswith("activations"):
        return "activation"
    name = region.split(" (")[0]  # of a slice, as ``weight[3].grad``
    if name.endswith(".grad"):
        return "gradient"
    states = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq")
    return "state" if name.endswith(states) else "parameter"


def operators_seconds(run: Callable[[], object]) -> float:
    """Return the time that torch's operators take in ``run``, by torch's profiler."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    every = profiler.key_averages()
    times = [float(one.self_cpu_time_total) for one in every if one.key.startswith("aten::")]
    return sum(times) / 1e6
