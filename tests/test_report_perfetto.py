"""The trace for Perfetto: valid by the format, complete, without overlaps on one track."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from synthetic_runlog import synthetic_log

from dynoffload.reporting import write_perfetto
from dynoffload.telemetry import RunLog, Transfer


def test_everything_recorded_is_in_the_trace(tmp_path: Path) -> None:
    log = synthetic_log(4)
    path = write_perfetto(log, tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    slices = {
        kind: [event for event in events if event["ph"] == "X" and event["cat"] == kind]
        for kind in ("step", "phase", "waiting", "fetch", "evict")
    }
    for kind in ("fetch", "evict"):
        expected = sum(t.nbytes for t in log.transfers if t.kind == kind)
        assert sum(e["args"]["bytes"] for e in slices[kind]) == expected
    assert len(slices["waiting"]) == len(log.stalls)
    assert len(slices["phase"]) == len(log.phases)
    assert [e["name"] for e in slices["step"]] == [f"step {i}" for i in range(4)]
    assert [e["args"]["accuracy"] is None for e in slices["step"]] == [True, False, False, False]
    order = {e["args"]["sort_index"]: e["tid"] for e in events if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[order[n]] for n in sorted(order)][:3] == ["step", "phase", "waiting"]
    assert names[events[0]["pid"]] == "step"  # viewers show the main thread's track first
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "fast tier"]
    assert [c["args"]["bytes"] for c in counters] == [m.fast_bytes for m in log.memory]
    assert {e["args"]["bytes"] for e in events if e["name"] == "budget"} == {log.budget}
    first = slices["phase"][0]
    took = (log.phases[0].end - log.phases[0].start) * 1e6
    assert first["dur"] == pytest.approx(took, abs=1e-2)


def test_slices_that_overlap_have_tracks_of_their_own(tmp_path: Path) -> None:
    log = RunLog("Net", "pager", "pilot", 1, 0)
    log.transfers = [Transfer(i * 0.1, 1 + i * 0.1, "fetch", f"r{i}", 1, "plan") for i in range(20)]
    path = write_perfetto(log, tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) == 10  # ten are on the way at any time
    assert tracks.keys() == {event["tid"] for event in events if event["name"] == "thread_name"}
    for slices in tracks.values():
        assert all(b[0] >= a[1] - 2e-3 for a, b in itertools.pairwise(sorted(slices)))
