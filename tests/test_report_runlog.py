"""The run log's file: what was saved is what is read, and nothing else is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_runlog import synthetic_log

from dynoffload import telemetry
from dynoffload.errors import TraceError
from dynoffload.telemetry import RunLog


def same(a: RunLog, b: RunLog) -> bool:
    """NaN is not equal to itself, so logs are compared by how they read."""
    return repr(a) == repr(b)


@pytest.mark.parametrize("name", ["run.runlog.json", "run.runlog.json.gz"])
def test_a_log_survives_its_file(tmp_path: Path, name: str) -> None:
    log = synthetic_log(4)
    assert any(blocks.predicted is None for blocks in log.blocks)
    assert same(RunLog.load(log.save(tmp_path / name)), log)


def test_a_log_that_json_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    log = synthetic_log(1)
    log.memory.append(telemetry.MemorySample(float("inf"), 0, 0))
    with pytest.raises(ValueError, match="JSON"):
        log.save(tmp_path / "bad.json")
    assert list(tmp_path.iterdir()) == []


def damaged(path: Path, change: object) -> Path:
    document = json.loads(path.read_text())
    change(document)  # type: ignore[operator]
    path.write_text(json.dumps(document))
    return path


def set_in(*keys: str | int, to: object) -> object:
    def change(document: dict) -> None:  # type: ignore[type-arg]
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_in("version", to=99), "version 99"),
        (set_in("format", to="other"), "not a run log"),
        (set_in("budget", to=-1), "budget"),
        (set_in("budget", to=True), "budget"),
        (set_in("model", to=None), "model"),
        (set_in("steps", to=[]), "steps"),
        (set_in("steps", "seconds", 0, to="soon"), "steps.seconds"),
        (set_in("steps", "seconds", 0, to=1e300), "steps.seconds"),
        (set_in("steps", "accuracy", 0, to=1.5), "steps.accuracy"),
        (set_in("transfers", "kind", 0, to="teleport"), "transfers.kind"),
        (set_in("transfers", "kind", 0, to=[]), "transfers.kind"),
        (set_in("transfers", "nbytes", 0, to=2**63), "transfers.nbytes"),
        (set_in("phases", "name", 0, to="lunch"), "phases.name"),
        (set_in("blocks", "actual", 0, to="abc"), "blocks.actual"),
        (set_in("blocks", "predicted", 0, to=[1]), "blocks.predicted"),
        (set_in("memory", "time", to=[0.0]), "memory"),
        (set_in("stalls", "more", to=[]), "stalls"),
    ],
)
def test_a_damaged_value_is_named(tmp_path: Path, change: object, named: str) -> None:
    path = damaged(synthetic_log(3).save(tmp_path / "log.json"), change)
    with pytest.raises(TraceError) as caught:
        RunLog.load(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["log.json", "log.json.gz"])
def test_every_truncation_is_refused(tmp_path: Path, name: str) -> None:
    path = synthetic_log(1, layers=1).save(tmp_path / name)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, max(1, len(whole) // 40)):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError):
            RunLog.load(path)


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (8 << 20)))
    with pytest.raises(TraceError, match="unpacks to more than"):
        RunLog.load(path)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    for wrong in (path, tmp_path / "nowhere.json"):
        with pytest.raises(TraceError, match=wrong.stem):
            RunLog.load(wrong)


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 10_000), junk=st.binary(min_size=1, max_size=8))
def test_a_mutated_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, junk: bytes
) -> None:
    directory = tmp_path_factory.mktemp("mutated")
    path = synthetic_log(1, layers=1).save(directory / "log.json")
    raw = bytearray(path.read_bytes())
    position %= len(raw)
    raw[position : position + len(junk)] = junk
    path.write_bytes(bytes(raw))
    try:
        log = RunLog.load(path)
    except TraceError:
        return
    assert same(RunLog.load(log.save(directory / "again.json")), log)
