"""Exports a run as a trace for ui.perfetto.dev and chrome://tracing, down to single transfers.

In the Trace Event Format ("JSON Object Format", Duncan and others, Google 2016). Steps, phases,
stalls, fetches and evictions each have as many tracks as overlap at a time. Memory is a counter.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynoffload.profiler.safefile import write_whole
from dynoffload.reporting.columns import Columns
from dynoffload.telemetry import RunLog

_PROCESS = 1
_Event = dict[str, Any]


def write_perfetto(log: RunLog, path: str | Path) -> Path:
    """Write ``log`` as a trace to ``path`` (compressed if it ends in ``.gz``) and return the path.

    Times are in microseconds since the session began, as the format requires.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "displayTimeUnit": "ms",
        "otherData": _about(log),
        "traceEvents": list(_events(log)),
    }
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    write_whole(path, gzip.compress(data, 5) if path.suffix == ".gz" else data)
    return path


def _about(log: RunLog) -> dict[str, str | int]:
    return {
        "model": log.model,
        "backend": log.backend,
        "policy": log.policy,
        "budget_bytes": log.budget,
        "headroom_bytes": log.headroom,
        "first_detailed_step": log.first_detailed,
        "dropped_records": log.dropped,
    }


def _events(log: RunLog) -> Iterator[_Event]:
    yield _about_track("process_name", 0, name=f"dynoffload: {log.model}")
    track = 1
    for kind, slices in _slices(log).items():
        ends: list[float] = []  # of each track's last slice, as slices of a track must not overlap
        for start, end, name, arguments in sorted(slices, key=lambda one: one[:2]):
            lane = next((lane for lane, last in enumerate(ends) if last <= start), len(ends))
            if lane == len(ends):
                title = f"{kind} {lane + 1}" if lane else kind
                yield _about_track("thread_name", track + lane, name=title)
                yield _about_track("thread_sort_index", track + lane, sort_index=track + lane)
                ends.append(end)
            ends[lane] = end
            yield {
                "ph": "X",
                "name": name,
                "cat": kind,
                "pid": _PROCESS,
                "tid": track + lane,
                "ts": _microseconds(start),
                "dur": _microseconds(max(0.0, end - start)),
                "args": arguments,
            }
        track += len(ends)
    for sample in log.memory:
        yield _counter("fast tier", sample.time, sample.fast_bytes)
        yield _counter("process (RSS)", sample.time, sample.rss_bytes)
    if log.memory:
        for time in (log.memory[0].time, log.memory[-1].time):
            yield _counter("budget", time, log.budget)


def _slices(log: RunLog) -> dict[str, list[tuple[float, float, str, _Event]]]:
    """Return start, end, name and arguments of each slice, by its kind."""
    stats = {step.step: {**asdict(step), "accuracy": None} for step in log.steps}
    for step in log.steps:
        if not math.isnan(step.accuracy):
            stats[step.step]["accuracy"] = step.accuracy
    return {
        "step": [
            (begin, end, f"step {step}", stats.get(step, {}))
            for step, (begin, end) in Columns.of(log).steps.items()
        ],
        "phase": [(one.start, one.end, one.name, {"step": one.step}) for one in log.phases],
        "waiting": [(one.start, one.end, f"wait for {one.region}", {}) for one in log.stalls],
        **{
            kind: [
                (one.start, one.end, one.region, {"bytes": one.nbytes, "cause": one.cause})
                for one in log.transfers
                if one.kind == kind
            ]
            for kind in ("fetch", "evict")
        },
    }


def _about_track(kind: str, track: int, **args: Any) -> _Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": args}


def _counter(name: str, time: float, value: int) -> _Event:
    args = {"bytes": value}
    return {"ph": "C", "name": name, "pid": _PROCESS, "ts": _microseconds(time), "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
