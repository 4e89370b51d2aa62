"""Comparison tables: the baseline is the measure, and what is wrong stands out."""

from __future__ import annotations

import io

from rich.console import Console

from dynoffload.reporting import ComparisonRow, comparison_table


def shown(*rows: ComparisonRow, budget: int = 320_000_000, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=color, legacy_windows=False)
    console.print(comparison_table(rows, title="Demo", budget=budget))
    return stream.getvalue()


def test_unequal_losses_and_a_passed_budget_are_loud() -> None:
    plain = ComparisonRow("plain", 1.0, peak_fast_bytes=10**9)
    quiet = shown(plain, ComparisonRow("x", 1.0, peak_fast_bytes=99), budget=100, color=True)
    wrong = ComparisonRow("x", 1.0, peak_fast_bytes=101, losses_equal=False)
    loud = shown(plain, wrong, budget=100, color=True)
    red = "\x1b[1;31m"
    assert red not in quiet
    assert red + "101 B" in loud
    assert red + "NO" in loud
    assert loud.count(red) == 2  # plain PyTorch has no budget to pass
