"""Exports a run as a trace for ui.perfetto.dev and chrome://tracing, down to single transfers.

In the Trace Event Format ("JSON Object Format", Duncan and others, Google 2016). One track holds
steps, one phases, one stalls; overlapping fetches and evictions get as many as they need. Counters
hold memory.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from dynoffload.reporting.columns import Columns
from dynoffload.telemetry import RunLog, Transfer

_PROCESS = 1
_STEPS, _PHASES, _STALLS = 1, 2, 3
_FETCHES, _EVICTIONS = 100, 200
"""First track of each direction; overlapping transfers take the next ones."""
MAX_LANES = 16
_Event = dict[str, Any]


def write_perfetto(log: RunLog, path: str | Path) -> Path:
    """Write ``log`` as a trace to ``path`` (compressed if it ends in ``.gz``) and return the path.

    Times are in microseconds since the session began, as the format requires.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with _open(partial, packed=path.suffix == ".gz") as stream:
            stream.write('{"displayTimeUnit":"ms","otherData":')
            json.dump(_about(log), stream)
            stream.write(',"traceEvents":[\n')
            for index, event in enumerate(_events(log)):
                stream.write(",\n" if index else "")
                json.dump(event, stream, separators=(",", ":"), allow_nan=False)
            stream.write("\n]}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _open(path: Path, *, packed: bool) -> IO[str]:
    if packed:
        return cast(IO[str], gzip.open(path, "wt", encoding="utf-8", compresslevel=5))
    return open(path, "w", encoding="utf-8")


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
    yield _named("process_name", 0, f"dynoffload: {log.model}")
    yield from _step_events(log)
    yield from _track(_PHASES, "phase")
    for phase in log.phases:
        yield _slice(phase.name, "phase", _PHASES, phase.start, phase.end, {"step": phase.step})
    yield from _track(_STALLS, "waiting")
    stalls = ((s.start, s.end, s.region) for s in log.stalls)
    for start, end, region in _clipped(stalls):
        yield _slice(f"wait for {region}", "stall", _STALLS, start, end, {"region": region})
    for kind, base in (("fetch", _FETCHES), ("evict", _EVICTIONS)):
        yield from _transfer_events(kind, base, [t for t in log.transfers if t.kind == kind])
    for sample in log.memory:
        yield _counter("fast tier", sample.time, {"bytes": sample.fast_bytes})
        yield _counter("process (RSS)", sample.time, {"bytes": sample.rss_bytes})
    if log.memory:
        for time in (log.memory[0].time, log.memory[-1].time):
            yield _counter("budget", time, {"bytes": log.budget})


def _step_events(log: RunLog) -> Iterator[_Event]:
    yield from _track(_STEPS, "step")
    stats = {step.step: step for step in log.steps}
    spans = ((begin, end, step) for step, (begin, end) in Columns.of(log).steps.items())
    for begin, end, step in _clipped(spans):
        arguments: dict[str, Any] = {}
        if step in stats:
            s = stats[step]
            arguments = {
                "stalls": s.stalls,
                "stall_s": s.stall_s,
                "bytes_in": s.bytes_in,
                "bytes_out": s.bytes_out,
                "wasted_bytes": s.wasted_bytes,
                "peak_fast_bytes": s.peak_fast_bytes,
                "accuracy": None if s.accuracy != s.accuracy else s.accuracy,
            }
        yield _slice(f"step {step}", "step", _STEPS, begin, end, arguments)


def _transfer_events(kind: str, base: int, transfers: list[Transfer]) -> Iterator[_Event]:
    transfers.sort(key=lambda t: (t.start, t.end))
    lanes = 0
    for lane, transfer in _laned(transfers):
        if lane == lanes:
            lanes += 1
            yield from _track(base + lane, kind if lane == 0 else f"{kind} {lane + 1}")
        yield _slice(
            transfer.region,
            f"{kind},{transfer.cause}",
            base + lane,
            transfer.start,
            transfer.end,
            {"bytes": transfer.nbytes, "cause": transfer.cause},
        )


def _laned(transfers: Iterable[Transfer]) -> Iterator[tuple[int, Transfer]]:
    """Yield transfers (sorted by start) with their first free lane; slices of one track must not
    overlap. With more than `MAX_LANES` at once, a transfer takes the lane that is free soonest.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for transfer in transfers:
        while busy and busy[0][0] <= transfer.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        elif len(busy) < MAX_LANES:
            lane = len(busy)
        else:
            lane = heapq.heappop(busy)[1]
        heapq.heappush(busy, (transfer.end, lane))
        yield lane, transfer


def _clipped(spans: Iterable[tuple[float, float, Any]]) -> Iterator[tuple[float, float, Any]]:
    """Yield spans sorted by start, each cut where the next begins (two threads may stall)."""
    ordered = sorted(spans)
    for (start, end, name), following in itertools.zip_longest(ordered, ordered[1:]):
        yield start, end if following is None else min(end, following[0]), name


def _slice(
    name: str, category: str, track: int, start: float, end: float, arguments: _Event
) -> _Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PROCESS,
        "tid": track,
        "ts": round(start * 1e6, 3),
        "dur": round(max(0.0, end - start) * 1e6, 3),
        "args": arguments,
    }


def _counter(name: str, time: float, values: dict[str, int]) -> _Event:
    return {"ph": "C", "name": name, "pid": _PROCESS, "ts": round(time * 1e6, 3), "args": values}


def _track(track: int, name: str) -> Iterator[_Event]:
    yield _named("thread_name", track, name)
    yield {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": _PROCESS,
        "tid": track,
        "args": {"sort_index": track},
    }


def _named(kind: str, track: int, name: str) -> _Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}
