"""What a session records: single records in bounded memory, all totals, no loss unsaid."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from synthetic_runlog import synthetic_log

from dynoffload.memory.device import Cause, Counters, Device, Event, EventKind
from dynoffload.reporting import write_run
from dynoffload.reporting.columns import Columns
from dynoffload.reporting.summary import left_out, summarize
from dynoffload.runtime import recording
from dynoffload.runtime.host import Headroom, Possible
from dynoffload.runtime.passes.finalization import Keeping
from dynoffload.runtime.recording import Recording
from dynoffload.runtime.sizing import Sizing
from dynoffload.telemetry import RunLog, StepStats
from dynoffload.units import GiB

REGION_BYTES = 4096


class Busy:
    """Counts as a device does, of which every step moves some regions and waits for some."""

    def __init__(self) -> None:
        self.bytes_in = self.stalls = self.lost = 0
        self.told: list[Event] = []
        self.names: dict[int, str] = {}

    def step(self, fetches: int, stalls: int = 0) -> None:
        """Move and wait."""
        self.bytes_in += fetches * REGION_BYTES
        self.stalls += stalls
        at = float(self.stalls + self.bytes_in)
        kinds = [EventKind.FETCH] * fetches + [EventKind.STALL] * stalls
        self.told += [Event(at, at + 1, REGION_BYTES, 7, kind, Cause.PLAN) for kind in kinds]

    def allocated_bytes(self) -> int:
        return 0

    def counters(self) -> Counters:
        return Counters(
            bytes_in=self.bytes_in,
            stalls=self.stalls,
            peak_bytes=64 * REGION_BYTES,
            events_lost=self.lost,
        )

    def events(self) -> list[Event]:
        told, self.told = self.told, []
        return told

    def resident_bytes(self) -> int:
        return 32 * REGION_BYTES

    def taken_bytes(self) -> int:
        return 48 * REGION_BYTES


class Run:
    """A recording of made-up steps."""

    def __init__(self) -> None:
        self.log = RunLog("Model", "pager", "pilot", budget=GiB, headroom=0)
        self.recording = Recording(
            self.log,
            GiB,
            Headroom(Possible(0, 0), Sizing(), lambda: (0, 0)),
            outside=lambda device: 0,
        )
        self.page()

    def page(self) -> None:
        """Begin with a new device."""
        self.device = Busy()
        self.recording.page(cast(Device, self.device), Keeping())

    def step(self, fetches: int, stalls: int = 0, blocks: int = 2) -> StepStats:
        """One step."""
        self.recording.phase("forward")
        self.device.step(fetches, stalls)
        self.recording.sample()
        self.recording.phase("backward")
        names = ("block",) * blocks
        return self.recording.end_step(names, names, 1.0)

    def records(self) -> int:
        """Return how many single records the log holds."""
        log = self.log
        return sum(map(len, (log.transfers, log.stalls, log.phases, log.memory, log.blocks)))


def test_the_latest_steps_stay_whole_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "MOST_RECORDS", 100)
    run = Run()
    everything = 0
    for step in range(50):
        before = run.records() + run.log.dropped
        run.step(fetches=20 + step % 5, stalls=3)
        everything += run.records() + run.log.dropped - before
        assert run.records() <= 100
    log = run.log
    assert everything == run.records() + log.dropped
    assert len(log.steps) == 50
    assert sum(s.bytes_in for s in log.steps) == run.device.bytes_in
    # Some 27 records a step: three steps fit, and these are all there.
    assert 46 <= log.first_detailed <= 47
    detailed = log.steps[log.first_detailed :]
    assert sum(t.nbytes for t in log.transfers) == sum(s.bytes_in for s in detailed)
    assert len(log.stalls) == sum(s.stalls for s in detailed)
    assert [b.step for b in log.blocks] == [s.step for s in detailed]
    assert {p.step for p in log.phases} <= {s.step for s in detailed}


def test_one_endless_step_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its end: an evaluation of hours makes samples of memory and no step."""
    monkeypatch.setattr(recording, "MOST_RECORDS", 100)
    monkeypatch.setattr(recording, "_SAMPLE_EVERY_S", 0.0)
    run = Run()
    for _ in range(150):
        run.recording.sample()
    assert len(run.log.memory) == 100
    assert run.log.dropped == 50
    stats = run.step(fetches=500)
    assert stats.bytes_in == 500 * REGION_BYTES
    assert run.records() <= 100
    run.step(fetches=1)
    assert run.log.first_detailed == 1
    assert len(run.log.transfers) == 1


def test_what_the_device_lost_is_counted_once() -> None:
    run = Run()
    run.step(fetches=1)
    run.device.lost = 700
    run.step(fetches=1)
    run.step(fetches=1)
    assert run.log.dropped == 700
    assert "700 single records" in left_out(run.log)
    run.page()
    run.device.lost = 30
    run.step(fetches=1)
    assert run.log.dropped == 730, "another device counts from zero"


def test_a_report_of_a_thinned_log_says_so_and_its_totals_are_whole(tmp_path: Path) -> None:
    whole, log = synthetic_log(40), synthetic_log(40)
    begin = min(p.start for p in log.phases if p.step == 30)
    log.first_detailed = 30
    for name, at in (("transfers", "start"), ("stalls", "start"), ("memory", "time")):
        table = getattr(log, name)
        kept = [record for record in table if getattr(record, at) >= begin]
        log.dropped += len(table) - len(kept)
        setattr(log, name, kept)
    for name in ("phases", "blocks"):
        setattr(log, name, [record for record in getattr(log, name) if record.step >= 30])
    assert summarize(log) == summarize(whole)
    assert Columns.of(log).begin == pytest.approx(begin)
    assert Columns.of(whole).begin == 0
    files = write_run(log, tmp_path / "run.html")
    page = " ".join(files.page.read_text().split())
    assert f"{log.dropped:,} single records" in page
    assert "covers steps 30 to 39" in page
    assert not left_out(whole)
    again = RunLog.load(files.log)
    assert (again.dropped, again.first_detailed) == (log.dropped, 30)


def test_empty_memory_of_the_pool_is_no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pool has and does not use is neither in use nor freed heap."""
    monkeypatch.setattr(recording, "_SAMPLE_EVERY_S", 0.0)
    monkeypatch.setattr(recording, "resident_bytes", lambda: 50 * REGION_BYTES)
    run = Run()
    run.recording.sample()
    assert run.log.headroom == 2 * REGION_BYTES
    (sample,) = run.log.memory
    assert (sample.fast_bytes, sample.rss_bytes) == (32 * REGION_BYTES, 50 * REGION_BYTES)
