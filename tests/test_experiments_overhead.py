"""The experiment on overhead runs, small, and its numbers are complete and consistent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from exactness import needs_pager

from dynoffload.config import OffloadConfig
from dynoffload.errors import ConfigError
from dynoffload.experiments import overhead
from dynoffload.experiments.clock import EVENTS, KINDS, PARTS
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.overhead import TIED, WAYS, Case, Overhead, Params, budget_of, cases
from dynoffload.experiments.ways import Spec, adamw, network
from dynoffload.runtime.sizing import sizing_of


@needs_pager
def test_where_the_time_of_a_step_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("moe", "tiny", shape={"rows": 1, "length": 16}, threads=1)
    monkeypatch.setattr(overhead, "cases", lambda: {"tiny": Case(spec, 0.25, warmup=3)})
    monkeypatch.setattr(overhead, "_RECORDED", 6)
    monkeypatch.setattr(overhead, "_TIER_SECONDS", 0.02)
    path = tmp_path / "overhead.json"
    carry_out(Overhead, Params(steps=2, spill_dir=Path("/var/tmp")), path)
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert row["plain_s"] > 0
    assert all(row["ways"][way]["over_floor"] > 0 for way in WAYS)
    assert row["floor_rate"] > 0
    for name in WAYS:
        way = row["ways"][name]
        assert way["losses_equal"] is True
        assert way["over_limit"] == way["seconds"] / max(row["plain_s"], way["moving_s"])
        assert sum(way["kinds"].values()) == pytest.approx(way["bytes_in"] + way["bytes_out"])
        assert set(way["kinds"]) == set(KINDS)
        assert sum(way["parts_s"].values()) < 2 * way["seconds"]
        assert all(way["parts_s"][part] > 0 for part in PARTS)
        assert all(way["events_s"][event] > 0 for event in EVENTS)
    assert row["ways"]["budget"]["kinds"]["gradient"] > 0
    assert row["ways"]["in_backward"]["kinds"]["gradient"] == 0
    assert row["plain_again"] > 0
    assert row["budget_bytes"] >= row["largest_bytes"]
    assert (tmp_path / "overhead.svg").stat().st_size > 0


def test_a_budget_under_which_nothing_moves_has_no_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no traffic to disturb plain steps with."""
    spec = Spec("moe", "tiny", shape={"rows": 1, "length": 16}, threads=1)
    monkeypatch.setattr(overhead, "cases", lambda: {"tiny": Case(spec, 1e9, warmup=5)})
    monkeypatch.setattr(overhead, "_TIER_SECONDS", 0.02)
    path = tmp_path / "overhead.json"
    carry_out(Overhead, Params(steps=2, spill_dir=Path("/var/tmp")), path)
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert all(row["ways"][way]["over_floor"] is None for way in WAYS)
    assert row["floor_rate"] is None
    assert row["ways"]["budget"]["losses_equal"] is True


def test_the_least_budget_is_that_of_an_operator() -> None:
    """An update of a tied embedding as a whole would take four times its bytes."""
    spec = replace(TIED, sizes={**TIED.sizes, "vocabulary": 20_011})
    budget, footprint = budget_of(Case(spec, 0), lambda _: None)
    assert footprint is None
    assert budget <= 1.6 * 20_011 * 256 * 4
    model = network(spec)
    sizing = sizing_of(model, adamw(model, spec), budget, OffloadConfig())
    assert sizing.flat


def test_a_case_that_there_is_not_is_refused() -> None:
    assert len(cases()) == 13
    with pytest.raises(ConfigError, match="base mixture, 512 tokens"):
        Overhead(Params(only=("none",))).cases()
