"""Comparison tables: the baseline is the measure, and what is wrong stands out."""

from __future__ import annotations

import io
import runpy
from pathlib import Path

import pytest
from rich.console import Console

from dynoffload.reporting import Comparison, ComparisonRow, comparison_table
from dynoffload.reporting.summary import Tone
from dynoffload.units import format_bytes

synthetic_log = runpy.run_path(str(Path(__file__).with_name("synthetic_runlog.py")))[
    "synthetic_log"
]


def shown(*rows: ComparisonRow, budget: int | None = None, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=160, force_terminal=color, legacy_windows=False)
    console.print(comparison_table(rows, title="Demo", budget=budget))
    return stream.getvalue()


def test_rows_are_compared_with_the_first() -> None:
    text = shown(ComparisonRow("plain", 2.0), ComparisonRow("pilot", 3.0, losses_equal=True))
    pilot = next(line for line in text.splitlines() if "pilot" in line)
    assert "1.50×" in pilot
    assert "yes" in pilot
    assert "vs plain" in text


def test_policies_of_real_logs_rank_as_they_ran() -> None:
    rows = [
        ComparisonRow.of(policy, synthetic_log(12, policy=policy), losses_equal=True)
        for policy in ("pilot", "repeat", "on-demand")
    ]
    assert rows[0].step_s < rows[1].step_s < rows[2].step_s
    assert rows[2].accuracy is None
    assert rows[2].wasted_share is None
    assert rows[0].accuracy is not None
    text = shown(*rows, budget=320_000_000)
    assert "on-demand" in text
    assert "305.18 MiB" in text


def test_unequal_losses_and_a_passed_budget_are_loud() -> None:
    quiet = shown(
        ComparisonRow("plain", 1.0),
        ComparisonRow("x", 1.0, peak_fast_bytes=99),
        budget=100,
        color=True,
    )
    loud = shown(
        ComparisonRow("plain", 1.0, peak_fast_bytes=10**9),
        ComparisonRow("x", 1.0, peak_fast_bytes=101, losses_equal=False),
        budget=100,
        color=True,
    )
    red = "\x1b[1;31m"
    assert red not in quiet
    assert red + "101 B" in loud
    assert red + "NO" in loud
    assert loud.count(red) == 2  # plain PyTorch has no budget to pass


def test_upright_runs_stand_in_columns_that_a_small_terminal_holds() -> None:
    names = ("plain", "on-demand", "repeat-last", "pilot")
    rows = [
        ComparisonRow(name, 0.5 * number, 0.1, 12, 10**9, 10**9, 0.031, 0.953, 10**8, True)
        for number, name in enumerate(names, start=1)
    ]
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    console.print(comparison_table(rows, title="Demo", budget=2 * 10**8, upright=True))
    text = stream.getvalue()
    lines = text.splitlines()
    assert all(any(name in line for line in lines[:3]) for name in names)
    assert next(line for line in lines if "vs plain" in line).split()[-2] == "4.00×"
    assert next(line for line in lines if "same losses" in line).count("yes") == 4
    assert "…" not in text


def test_wasted_prefetch_is_told_in_bytes_and_as_a_share() -> None:
    log = synthetic_log(12)
    row = ComparisonRow.of("pilot", log, warmup=2)
    wasted = sorted(step.wasted_bytes for step in log.steps[2:])
    assert row.wasted_bytes == (wasted[4] + wasted[5]) // 2 > 0
    comparison = Comparison("Four", (ComparisonRow("plain", 1.0), row))
    words = dict(zip(comparison.headers(), comparison.cells(row), strict=True))
    assert words["wasted prefetch"] == (format_bytes(row.wasted_bytes), Tone.PLAIN)
    assert words["wasted share"] == (f"{row.wasted_share:.1%}", Tone.PLAIN)


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        comparison_table([])
    with pytest.raises(ValueError, match="at least one row"):
        Comparison("nothing", ())
