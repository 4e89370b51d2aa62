"""The experiment on ablations runs, small, and keeps all bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exactness import needs_pager

from dynoffload.experiments import ablations
from dynoffload.experiments.ablations import SWITCHES, Ablations, Params
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.overhead import Case
from dynoffload.experiments.ways import Spec


@pytest.mark.slow
@needs_pager
def test_each_part_is_switched_off_and_bits_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec("moe", "tiny", shape={"rows": 1, "length": 16}, threads=1)
    monkeypatch.setattr(ablations, "cases", lambda: {"small mixture": Case(spec, 0.25, warmup=3)})
    path = tmp_path / "ablations.json"
    params = Params(only=("small mixture",), steps=2, at_once=5, spill_dir=Path("/var/tmp"))
    carry_out(Ablations, params, path)
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert list(row["ways"]) == list(SWITCHES)
    for name, way in row["ways"].items():
        assert way["why"] == "", name
        assert way["losses_equal"] is True, name
        assert len(way["steps_s"]) == len(way["full_steps_s"]) == 2
    written = {name: way["bytes_out"] for name, way in row["ways"].items()}
    assert written["comparison before writes"] > written["guard thread"]
