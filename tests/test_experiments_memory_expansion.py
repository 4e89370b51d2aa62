"""The published figures of the paper are met, and what is varied begins where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynoffload.experiments.harness import NoParameters, carry_out
from dynoffload.experiments.memory_expansion import PUBLISHED, MemoryExpansion

TOLERANCE = {key: 0.04 if key.startswith("ratio") else 0.03 for key in PUBLISHED}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The only row, and where the figure lies."""
    path = tmp_path_factory.mktemp("expansion") / "new" / "numbers.json"
    (row,) = carry_out(MemoryExpansion, NoParameters(), path)["rows"]
    return row, path.with_suffix(".svg")


def keyed(rows: list[dict[str, Any]], *keys: str) -> dict[Any, dict[str, Any]]:
    return {tuple(row[key] for key in keys): row for row in rows}


def test_published_figures_and_orders(found: tuple[dict[str, Any], Path]) -> None:
    rows = {row["key"]: row for row in found[0]["published"]}
    for key, tolerance in TOLERANCE.items():
        assert abs(rows[key]["deviation"]) <= tolerance, key
    assert rows["order_conservative, fastest first"]["computed"] == "4 2 3 1"
    assert rows["order_aggressive, fastest first"]["computed"] == "4 3 2 1"


def test_ahead_is_faster_and_takes_more_local_memory(found: tuple[dict[str, Any], Path]) -> None:
    sizes = keyed(found[0]["capacity"], "strategy", "movement")
    bars = keyed(found[0]["steps"], "design", "strategy", "movement")
    for design, strategy in {key[:2] for key in bars}:
        serial, overlapped, planned = (
            sizes[strategy, name]["hbm_gb"] for name in ("serial", "overlapped", "planned")
        )
        assert serial < overlapped
        assert serial <= planned <= overlapped
        serial, overlapped, planned = (
            bars[design, strategy, name]["seconds"] for name in ("serial", "overlapped", "planned")
        )
        assert planned <= overlapped * (1 + 1e-9)
        assert overlapped < serial
        assert bars[design, "conservative", "planned"]["exposed_remote_s"] == 0


def test_sensitivity_begins_where_the_result_is(found: tuple[dict[str, Any], Path]) -> None:
    rows = {row["changed"]: row for row in found[0]["sensitivity"]}
    same = ("2 sequences", "TP16 DP16 EP128×2", "0% of a step hides movement", "no optimizer I/O")
    for changed in same:
        for number, ratio in ((1, 2.84), (4, 1.43)):
            assert rows[changed][f"ratio_design{number}"] == pytest.approx(ratio, abs=0.005)
    ratios = [row["ratio_design1"] for text, row in rows.items() if text.endswith(("nce", "nces"))]
    assert ratios == sorted(ratios, reverse=True)


def test_pools_slow_down_with_their_sharers(found: tuple[dict[str, Any], Path]) -> None:
    bars = keyed(found[0]["steps"], "design", "strategy", "movement")
    for strategy in ("conservative", "aggressive"):
        pools = [row for row in found[0]["pooled"] if row["strategy"] == strategy]
        for way, movement in (("at_once", "serial"), ("planned", "planned")):
            own = bars["2 CXL memory per GPU", strategy, movement]["seconds"]
            assert pools[0][way] == own  # of the memory of one GPU
        for way in ("at_once", "in_turns", "overlapped", "planned"):
            times = [row[way] for row in pools]
            assert times == sorted(times)
        assert all(row["in_turns"] <= row["at_once"] * (1 + 1e-9) for row in pools)


def test_the_figure_names_designs_and_segments(found: tuple[dict[str, Any], Path]) -> None:
    drawn = found[1].read_text(encoding="utf-8")
    for words in ("exposed remote", "(3) integrated, network by CPU"):
        assert words in drawn
