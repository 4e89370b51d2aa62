"""The published figures of the paper are met, and what is varied begins where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynoffload.experiments.harness import NoParameters, carry_out
from dynoffload.experiments.memory_expansion import (
    PUBLISHED,
    SETTING,
    MemoryExpansion,
    computed,
)

TOLERANCE = {key: 0.04 if key.startswith("ratio") else 0.03 for key in PUBLISHED}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return computed(SETTING)


def test_published_figures_and_orders(result: dict[str, Any]) -> None:
    for key, tolerance in TOLERANCE.items():
        assert abs(result["published"][key]["deviation"]) <= tolerance, key
    conservative, aggressive = result["order_conservative"], result["order_aggressive"]
    assert conservative[0] == aggressive[0] == 4
    assert conservative.index(2) < conservative.index(3)
    assert aggressive.index(3) < aggressive.index(2)


def test_ahead_is_faster_and_takes_more_local_memory(result: dict[str, Any]) -> None:
    schedules = result["schedules"]
    for strategy in ("conservative", "aggressive"):
        sizes = {name: schedules[name]["hbm_gb"][strategy] for name in schedules}
        assert sizes["serial"] < sizes["overlapped"]
        assert sizes["serial"] <= sizes["planned"] <= sizes["overlapped"]
        for design in result["designs"].values():
            times = {name: bar["seconds"] for name, bar in design[strategy].items()}
            assert times["planned"] <= times["overlapped"] * (1 + 1e-9)
            assert times["overlapped"] < times["serial"]
    for design in result["designs"].values():
        assert design["conservative"]["planned"]["exposed_remote_s"] == 0


def test_sensitivity_begins_where_the_result_is(result: dict[str, Any]) -> None:
    rows = result["sensitivity"]
    same = (rows["batch"][1], rows["parallelism"][1], rows["overlap"][0], rows["update"][0])
    for row in same:
        for number in (1, 4):
            key = f"ratio_design{number}"
            assert row[key] == pytest.approx(result[key])
    ratios = [row["ratio_design1"] for row in rows["batch"]]
    assert ratios == sorted(ratios, reverse=True)


def test_pools_slow_down_with_their_sharers(result: dict[str, Any]) -> None:
    private = result["designs"]["2"]
    for strategy in ("conservative", "aggressive"):
        first = result["pooled"][0][strategy]
        assert first["at_once"] == private[strategy]["serial"]
        assert first["planned"] == private[strategy]["planned"]
        for way in first:
            times = [row[strategy][way]["seconds"] for row in result["pooled"]]
            assert times == sorted(times)
        for row in result["pooled"]:
            at_once, in_turns = (row[strategy][way]["seconds"] for way in ("at_once", "in_turns"))
            assert in_turns <= at_once * (1 + 1e-9)


def test_the_command_writes_tables_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "numbers.json"
    carry_out(MemoryExpansion, NoParameters(), path)
    printed, drawn = capsys.readouterr().out, path.with_suffix(".svg").read_text(encoding="utf-8")
    assert "TP16 DP16 EP128×2" in printed
    assert "+0.5%" in printed
    for words in ("exposed remote", "(3) integrated, network by CPU"):
        assert words in drawn
