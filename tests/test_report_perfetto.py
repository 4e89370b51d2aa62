"""The trace for Perfetto: valid by the format, complete, and without overlaps on one track."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from synthetic_runlog import synthetic_log

from dynoffload.reporting import write_perfetto
from dynoffload.reporting.perfetto import MAX_LANES
from dynoffload.telemetry import RunLog, Transfer


def events_of(log: RunLog, directory: Path) -> list[dict[str, Any]]:
    path = write_perfetto(log, directory / "trace.json")
    return list(json.loads(path.read_text())["traceEvents"])


def slices(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["cat"].split(",")[0] == category]


def overlaps(events: list[dict[str, Any]]) -> int:
    tracks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    found = 0
    for intervals in tracks.values():
        intervals.sort()
        found += sum(b[0] < a[1] - 2e-3 for a, b in itertools.pairwise(intervals))
    return found


def test_everything_recorded_is_in_the_trace(tmp_path: Path) -> None:
    log = synthetic_log(4)
    events = events_of(log, tmp_path)
    for kind in ("fetch", "evict"):
        expected = sum(t.nbytes for t in log.transfers if t.kind == kind)
        assert sum(e["args"]["bytes"] for e in slices(events, kind)) == expected
    assert len(slices(events, "stall")) == len(log.stalls)
    assert len(slices(events, "phase")) == len(log.phases)
    assert [e["name"] for e in slices(events, "step")] == [f"step {i}" for i in range(4)]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "fast tier"]
    assert [c["args"]["bytes"] for c in counters] == [m.fast_bytes for m in log.memory]
    assert {e["args"]["bytes"] for e in events if e["name"] == "budget"} == {log.budget}
    first = slices(events, "phase")[0]
    assert first["dur"] == pytest.approx((log.phases[0].end - log.phases[0].start) * 1e6, abs=1e-2)


def test_every_track_has_a_name_and_no_overlap(tmp_path: Path) -> None:
    events = events_of(synthetic_log(6), tmp_path)
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in events if e["ph"] == "X"} <= named
    assert overlaps(events) == 0


def test_transfers_at_the_same_time_get_tracks_of_their_own(tmp_path: Path) -> None:
    log = RunLog("Net", "pager", "pilot", 1, 0)
    log.transfers = [Transfer(i * 0.1, 1 + i * 0.1, "fetch", f"r{i}", 1, "plan") for i in range(20)]
    events = events_of(log, tmp_path)
    assert len({e["tid"] for e in slices(events, "fetch")}) == 10  # ten are on the way at any time
    assert overlaps(events) == 0


def test_tracks_are_bounded(tmp_path: Path) -> None:
    log = RunLog("Net", "pager", "pilot", 1, 0)
    log.transfers = [Transfer(0, 1, "fetch", f"r{i}", 1, "plan") for i in range(3 * MAX_LANES)]
    events = slices(events_of(log, tmp_path), "fetch")
    assert len(events) == 3 * MAX_LANES
    assert len({e["tid"] for e in events}) == MAX_LANES
