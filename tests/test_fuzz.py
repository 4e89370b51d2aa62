"""Mutated pilots and traces do no harm; and the fuzzer sees harm where there is some."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzzing
import pytest
from fuzz_seeds import Seeds, make_seeds
from fuzzing import Fuzzer, Tally, fuzz

SHARES = [500, pytest.param(1500, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return make_seeds(tmp_path_factory.mktemp("seeds"))


@pytest.mark.parametrize("share", SHARES)
def test_mutated_files_work_or_are_refused_in_words(
    seeds: Seeds, tmp_path: Path, share: int
) -> None:
    """A fixed share of what `make fuzz` does."""
    tally = fuzz(seeds, share, seed=1, folder=tmp_path, keep=tmp_path / "kept")
    told = "\n".join(f"{row['kind']} {row['case']}: {row['stack']}" for row in tally.failures)
    assert not tally.failures, told
    assert tally.outcomes.total() == share
    for kind in ("pilot document", "pilot arrays", "trace document", "trace arrays"):
        assert tally.outcomes[kind, "works"]
        assert tally.outcomes[kind, "refused"]


def _eat(*_: Any) -> None:
    b"x" * (2 * fuzzing.MEMORY)


def _hang(*_: Any) -> None:
    while True:
        pass


def _warn(*_: Any) -> None:
    warnings.warn("overflow", RuntimeWarning, stacklevel=1)


def _fail(*_: Any) -> None:
    raise KeyError("blocks")


HARM: dict[str, Callable[..., None]] = {
    "error": _fail,
    "warning": _warn,
    "memory": _eat,
    "cpu": _hang,
    "crash": lambda *_: os.abort(),
    "audit": lambda *_: eval("1 + 1"),
}


@pytest.mark.parametrize("outcome", HARM)
def test_harm_is_seen(
    outcome: str, seeds: Seeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three files two are pilots, and each does harm; the trace between them does none."""
    fuzzer = Fuzzer(seeds, 0, tmp_path)
    monkeypatch.setattr(fuzzing, "use_pilot", HARM[outcome])
    monkeypatch.setattr(fuzzing, "CPU_S", 0.2)
    tally = Tally()
    case = 0
    while case < 3:
        case = fuzzing._batch(fuzzer, case, 3, tally, tmp_path / "kept")
    harmed = [(f["case"], f["outcome"]) for f in tally.failures]
    assert harmed == [(0, outcome), (2, outcome)]
    kept = tmp_path / "kept" / "2.pilot"
    assert kept.read_bytes() == fuzzer.file(2)[2], "the file itself is kept, and made again"


def test_a_file_that_is_written_elsewhere_is_seen(
    seeds: Seeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    fuzzer = Fuzzer(seeds, 0, inside)
    for where, outcome in ((inside / "x", "works"), (outside, "audit")):
        monkeypatch.setattr(fuzzing, "use_pilot", lambda *_, to=where: to.write_text("x"))
        tally = Tally()
        fuzzing._batch(fuzzer, 0, 1, tally, tmp_path / "kept")
        assert [o for _, o in tally.outcomes] == [outcome]
