"""The table and the figure of `dynoffload.experiments.estimates`.

What it is: its numbers as people read them. What it is not: their computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.comparing import draw_diagonal, marked, write_between
from dynoffload.units import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEAK_WORST, STEP_WORST = 0.10, 0.20
"""Relative errors that are asked for."""
_COLUMNS = (
    *("network", "budget", "estimated ms", "real ms", "error"),
    *("fast MiB", "real", "error", "file MiB", "real", "error", "bound by"),
)
_WIDTH = 120  # of the table, where the output is no terminal
_NAMES = {"step_error": "step time", "fast_error": "fast memory", "file_error": "spill file"}


def show(result: Mapping[str, Any]) -> None:
    """Print the table and what is to be said of it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, _WIDTH))
    table = Table(title="estimated and real", title_justify="left", box=None)
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if number in (0, 11) else "right")
    for row in result["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    for line in said(result):
        console.print(line, highlight=False)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return one row; what misses what is asked for is marked."""
    ours, real = row["estimated"], row["real"]
    head = [row["network"], f"{row['share']:.3g}"]
    if not real:
        told = "too small, both say" if row["agrees"] else "too small, one says miss"
        return [*head, told, *[""] * (len(_COLUMNS) - 3)]
    return [
        *head,
        f"{ours['step_s'] * 1e3:.0f}",
        f"{real['step_s'] * 1e3:.0f}",
        marked(row["step_error"], STEP_WORST),
        f"{ours['fast_peak'] / MiB:.1f}",
        f"{real['fast_peak'] / MiB:.1f}",
        marked(row["fast_error"], PEAK_WORST),
        f"{ours['file_peak'] / MiB:.1f}",
        f"{real['file_peak'] / MiB:.1f}",
        marked(row["file_error"], PEAK_WORST),
        "nothing" if ours["resident"] else ours["bound"],
    ]


def said(result: Mapping[str, Any]) -> list[str]:
    """Return what was asked for, and whether it holds."""
    found = result["summary"]
    unseen = found["unseen"]
    lines = [
        f"{name}: median error {found[key]['median']:.1%}, worst {found[key]['worst']:.1%} (at "
        f"most {STEP_WORST if key == 'step_error' else PEAK_WORST:.0%}: "
        f"{'holds' if found[key]['holds'] else 'missed'}), {found[key]['within']} of "
        f"{found['rows']} within"
        for key, name in _NAMES.items()
    ]
    if unseen["rows"]:
        lines.append(
            f"step time of kinds that nothing was fitted to ({', '.join(unseen['networks'])}): "
            f"median error {unseen['median']:.1%}, worst {unseen['worst']:.1%}, "
            f"{unseen['within']} of {unseen['rows']} within"
        )
    return lines


def write_table(result: Mapping[str, Any], page: Path) -> None:
    """Write the table of a page anew, between its marks.

    Raises:
        ConfigError: the page does not have them.
    """
    lines = [
        f"| {' | '.join(_COLUMNS)} |",
        f"| --- |{' ---: |' * (len(_COLUMNS) - 2)} --- |",
        *(f"| {' | '.join(cells(row))} |" for row in result["rows"]),
        "",
        *(f"- {line}" for line in said(result)),
    ]
    write_between(page, lines)


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """Draw estimated against real: seconds of a step, and peaks."""
    from dynoffload.reporting.canvas import write_figure as write

    write(lambda figure, color: _draw(figure, color, result), path, height=4.6)


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, 2)
    shown = [row for row in result["rows"] if row["real"]]
    kinds = (
        ("ms per step", STEP_WORST, (("step_s", 1e3, "compute", "step"),)),
        (
            "MiB at the peak",
            PEAK_WORST,
            (
                ("fast_peak", 1 / MiB, "plan", "fast memory"),
                ("file_peak", 1 / MiB, "fault", "spill file"),
            ),
        ),
    )
    for axes, (label, most, series) in zip(panels, kinds, strict=True):
        every = []
        for key, scale, shade, name in series:
            points = [(row["real"][key] * scale, row["estimated"][key] * scale) for row in shown]
            every += points
            axes.scatter(*zip(*points, strict=True), s=22, color=color[shade], label=name, zorder=3)
        if not every:
            continue
        draw_diagonal(axes, color, [one for point in every for one in point], most)
        axes.set(xlabel=f"real, {label}", ylabel="estimated")
        axes.legend(frameon=False, loc="upper left")
