"""Tables and the figure of `dynoffload.experiments.planner.optimality`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AIMS = {"mean_gap": 0.03, "worst_gap": 0.10, "cpu_s": 0.5}
"""What the planner is meant to keep to."""
_COLORS = {"slow": "stall", "even": "plan", "fast": "optimizer"}


def show(result: Mapping[str, Any]) -> None:
    """Print all tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "problems", "proven", "exact", "mean gap", "worst gap", title="planner")
    rows = [("all", result)]
    rows += [(kind, row) for kinds in result["by"].values() for kind, row in kinds.items()]
    for name, row in rows:
        gaps = (_percent(row["mean_gap"]), _percent(row["worst_gap"]))
        table.add_row(name, str(row["problems"]), str(row["counted"]), str(row["exact"]), *gaps)
    console.print(table)
    if result["scaling"]:
        columns = ("operators", "visits", "blocks", "CPU s, median", "worst")
        table = Table(*columns, title="planning large steps")
        for row in result["scaling"]:
            seconds = (f"{row['cpu_s']:.3f}", f"{row['cpu_worst_s']:.3f}")
            counts = (str(row[key]) for key in ("operators", "visits", "blocks"))
            table.add_row(*counts, *seconds)
        console.print(table)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the figure to ``path``, which ends in ``.svg`` or ``.png``."""
    from dynoffload.reporting.canvas import write_figure

    write_figure(lambda figure, color: _draw(figure, color, result), path, height=3.2)


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    first, second = figure.subplots(1, 2)
    _distribution(first, color, result)
    _against_one(second, color, result)


def _distribution(axes: Axes, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    """Draw which share of the problems has at most which gap."""
    for link, paint in _COLORS.items():
        rows = [row for row in result["rows"] if row["link"] == link and row["proven"]]
        gaps = sorted(100 * max(0.0, row["gap"]) for row in rows)
        shares = [100 * (place + 1) / len(gaps) for place in range(len(gaps))]
        axes.step(gaps, shares, where="post", color=color[paint], label=f"{link} link")
    axes.axvline(
        100 * AIMS["worst_gap"], color=color["stall"], linewidth=0.9, linestyle=(0, (4, 3))
    )
    axes.set_xlim(-0.2, 100 * AIMS["worst_gap"] + 0.5)
    axes.set_ylim(0, 102)
    axes.set_xlabel("step longer than the optimum by at most, %")
    axes.set_title("problems, %", loc="left", fontsize=8.5)
    axes.legend(frameon=False, loc="lower right")


def _against_one(axes: Axes, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    """Draw what a step takes with one means alone, against both."""
    shown = {
        "moving_only_s": ("moving alone", "stall"),
        "recomputing_only_s": ("recomputing", "fault"),
    }
    for key, (label, paint) in shown.items():
        ratios = sorted(
            row[key] / row["planned_s"] for row in result["rows"] if row[key] is not None
        )
        x = [100 * place / max(1, len(ratios) - 1) for place in range(len(ratios))]
        axes.plot(x, ratios, color=color[paint], linewidth=1.4, label=label)
    axes.set_xlabel("problems, %")
    axes.set_title("times as long as with both", loc="left", fontsize=8.5)
    axes.set_ylim(0.95, None)
    axes.legend(frameon=False, loc="upper left")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"
