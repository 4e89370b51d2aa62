"""Files of traces and pilots: equal parts make equal files, and nothing else is believed."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from synthetic_pilot import recorded_step, routed

from dynoffload.errors import DynOffloadError, PilotError, TraceError
from dynoffload.pilot import pilot as pilot_file
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import learn_pilot
from dynoffload.profiler import load_trace, safefile, save_trace, storage


@dataclass(frozen=True)
class Format:
    """How one kind of file is written and read."""

    save: Callable[[Path], None]
    load: Callable[[Path], Any]
    key: str
    version: int
    remedy: str


@pytest.fixture(scope="module", params=["trace", "pilot"])
def form(request: pytest.FixtureRequest) -> Format:
    if request.param == "trace":
        step = recorded_step()
        return Format(
            lambda path: save_trace(step, path),
            load_trace,
            storage.FORMAT,
            storage.SCHEMA_VERSION,
            "record it again with `dynoffload profile`",
        )
    pilot = learn_pilot(*routed(40, experts=4, codes=9))
    return Format(
        pilot.save,
        Pilot.load,
        pilot_file.FORMAT,
        pilot_file.VERSION,
        "Train the pilot again: dynoffload pilot train TRACES -o some.file",
    )


@pytest.fixture
def path(form: Format, tmp_path: Path) -> Path:
    where = tmp_path / "some.file"
    form.save(where)
    return where


def test_equal_parts_are_equal_files_and_no_other_file_is_left(form: Format, path: Path) -> None:
    before = path.read_bytes()
    path.write_bytes(b"what was there before")
    form.save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["some.file"]


def test_a_failed_write_leaves_the_old_file(
    form: Format, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(safefile.os, "replace", full)
    with pytest.raises(DynOffloadError, match=r"some\.file.*No space left"):
        form.save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["some.file"]


def test_places_that_cannot_be_written_or_read_are_named(form: Format, tmp_path: Path) -> None:
    with pytest.raises(DynOffloadError, match=r"nowhere.*cannot be written"):
        form.save(tmp_path / "nowhere" / "some.file")
    for missing in (tmp_path / "gone.file", tmp_path):
        with pytest.raises(DynOffloadError, match=missing.name):
            form.load(missing)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a file of this kind"),
        (b"PK\x03\x04" + bytes(100), "not a file of this kind"),
        (b"PAR1" + bytes(100) + b"PAR1", "not a file of this kind"),
        (pickle.dumps({"a": 1}), "not a file of this kind"),
        ((2**62).to_bytes(8, "little") + b"{}" * 50, "not a file of this kind"),
        ((900).to_bytes(8, "little") + b"{}" * 50, "cut short"),
        ((100).to_bytes(8, "little") + b"[" * 100, "nested too deeply"),
        ((2).to_bytes(8, "little") + b"{}", "other safetensors"),
        (save({"a": np.ones(2)}, {"format": "np"}), "other safetensors"),
    ],
)
def test_foreign_files_are_refused_by_name(
    content: bytes, reason: str, form: Format, path: Path
) -> None:
    path.write_bytes(content)
    with pytest.raises((PilotError, TraceError), match=rf"some\.file.*{reason}.*") as error:
        form.load(path)
    assert form.remedy in str(error.value)


@pytest.mark.parametrize("version", [0, 98, 99, "one", None])
def test_another_version_is_refused_with_the_remedy(version: Any, form: Format, path: Path) -> None:
    document, arrays = safefile.read_file(path, form.key, form.version)
    path.write_bytes(safefile.pack(document, arrays, form.key, version))
    with pytest.raises(DynOffloadError, match=f"this release reads {form.version}") as error:
        form.load(path)
    assert form.remedy in str(error.value)


def test_limits_hold_for_writers_and_readers(
    form: Format, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_FILE", "MAX_DOCUMENT", "MAX_ARRAYS"):
        monkeypatch.setattr(safefile, name, 3)
        with pytest.raises(DynOffloadError, match=r"some\.file"):
            form.load(path)
        with pytest.raises(DynOffloadError, match="than is read"):
            form.save(path)
        monkeypatch.undo()
    form.load(path)


def test_random_damage_is_refused_or_changes_nothing(form: Format, path: Path) -> None:
    """Flipped and cut bytes, anywhere or in the header, escape as nothing but our errors."""
    whole = path.read_bytes()
    parts = safefile.read_file(path, form.key, form.version)
    chance = random.Random(0)
    for number in range(300):
        damaged = bytearray(whole)
        stop = chance.choice([2000, len(whole)])
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(stop)] = chance.randrange(256)
        if number % 5 == 0:
            start = chance.randrange(len(damaged))
            damaged[start : start + chance.randrange(64)] = b""
        path.write_bytes(damaged)
        try:
            form.load(path)
        except DynOffloadError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert path.name in said
            continue
        document, arrays = safefile.read_file(path, form.key, form.version)
        assert document == parts[0]
        assert all(np.array_equal(arrays[name], array) for name, array in parts[1].items())
