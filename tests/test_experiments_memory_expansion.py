"""The published figures are met, and what is committed is what the code computes."""

from __future__ import annotations

import json
import re
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
from dynoffload.reporting import canvas

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = ROOT / "docs" / "results" / "memory-expansion.json"
TOLERANCE = {key: 0.04 if key.startswith("ratio") else 0.03 for key in PUBLISHED}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return computed(SETTING)


@pytest.mark.parametrize("key", PUBLISHED)
def test_published_figures(result: dict[str, Any], key: str) -> None:
    assert abs(result["published"][key]["deviation"]) <= TOLERANCE[key]


def test_published_orders(result: dict[str, Any]) -> None:
    conservative, aggressive = result["order_conservative"], result["order_aggressive"]
    assert conservative[0] == aggressive[0] == 4
    assert conservative.index(2) < conservative.index(3)
    assert aggressive.index(3) < aggressive.index(2)


def test_segments_add_up(result: dict[str, Any]) -> None:
    for design in result["designs"].values():
        for strategy in ("conservative", "aggressive"):
            for bar in design[strategy].values():
                parts = [value for key, value in bar.items() if key != "seconds"]
                assert len(parts) == 4
                assert min(parts) >= 0
                assert sum(parts) == pytest.approx(bar["seconds"])


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


def test_planned_updates_begin_where_planned_movement_is(result: dict[str, Any]) -> None:
    none, gradients, _, on_device = result["planned_update"]
    for strategy in ("conservative", "aggressive"):
        for number, design in result["designs"].items():
            planned = design[strategy]["planned"]["seconds"]
            assert none[strategy]["seconds"][number] == planned
            assert planned < gradients[strategy]["seconds"][number]
        assert none[strategy]["hbm_gb"] == result["schedules"]["planned"]["hbm_gb"][strategy]
        # A second area for the state of a layer with experts.
        state = result["areas_gb"][strategy]["local"]["a layer's optimizer state"]
        assert on_device[strategy]["hbm_gb"] > none[strategy]["hbm_gb"] + 0.99 * state


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


def check_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare what JSON holds; versions of Python differ in how they round a sum of floats."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            check_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, value in enumerate(expected):
            check_equal(found[place], value, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-15), where
    else:
        assert found == expected, where


@pytest.mark.skipif(not NUMBERS.is_file(), reason="not a checkout")
def test_committed_numbers_are_computed_ones(result: dict[str, Any]) -> None:
    (committed,) = json.loads(NUMBERS.read_text(encoding="utf-8"))["rows"]
    check_equal({"case": "setting", **json.loads(json.dumps(result))}, committed)


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


def test_figures_in_files_have_the_colours_of_the_light_page() -> None:
    page = Path(canvas.__file__).parent / "templates" / "report.html.j2"
    css = page.read_text(encoding="utf-8")
    light = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", css[: css.index("prefers-color-scheme")]))
    assert {name: light[name] for name in canvas.PAPER} == canvas.PAPER
