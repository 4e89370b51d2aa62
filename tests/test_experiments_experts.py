"""The experiment about experts runs, and counts what it says it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from exactness import needs_pager

from dynoffload.experiments.experts import ASKED, POLICIES, Experts, Params, Tally
from dynoffload.experiments.harness import carry_out

pytest.importorskip("transformers")


def test_a_tally_counts_over_all_sets() -> None:
    tally = Tally()
    tally.add({1, 2, 3}, {2, 3})
    tally.add(set(), {4, 5})
    assert tally.scores() == {"recall": 0.5, "precision": 2 / 3, "f1": 4 / 7}


@pytest.mark.slow
def test_routers_and_pilots_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "experts.json"
    params = Params(("deepseek-v3",), seeds=1, train=3, length=8, samples=24, held_out=6, size="")
    found = carry_out(Experts, params, path)
    (row,) = found["rows"]
    assert 0.1 < row["hit"] < 0.5
    assert row["uniform"]["recall"] == pytest.approx(row["hit"], rel=0.1)
    for what in ("pilot", "last order", "ahead", "first", "routers, ahead"):
        assert row["uniform"]["f1"] < row[what]["f1"] <= 1
    assert found["summary"]["deepseek-v3"]["recall ahead"] == row["ahead"]["recall"]
    assert "deepseek-v3" in capsys.readouterr().out


@needs_pager
@pytest.mark.slow
def test_mixtures_train_under_a_budget_in_all_ways(tmp_path: Path) -> None:
    params = Params(
        ("olmoe",), seeds=1, train=3, samples=24, held_out=4, size="tiny", steps=4, warmup=1
    )
    found = carry_out(Experts, params, tmp_path / "experts.json")
    runs = found["rows"][0]["runs"]
    assert runs["repeatable"]
    for key in POLICIES:
        assert runs[key]["losses_equal"], key
        assert runs[key]["bytes_in"] > 0
    assert found["summary"]["olmoe"].keys() > ASKED.keys()
