"""The table and the figure of a search for the largest that fits.

What it is: what `dynoffload.experiments.largest` has found, as people read it. What it is not: the
search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.largest import PACES
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 130  # of the table, where the output is no terminal
_SHADES = {
    "plain": ("ink", "o"),
    "system": ("fault", "v"),
    "dtr": ("stall", "D"),
    "on-demand": ("rss", "^"),
    "replay": ("backward", "s"),
    "repeat": ("plan", "P"),
}
"""Way -> colour and mark."""


def heads(unit: str) -> list[str]:
    """Return the columns of a table; ``unit`` is what a size counts, in the plural."""
    paces = [f"at most {pace:g}x" for pace in PACES]
    return ["way", f"largest ({unit})", "times plain", "step", "pace", *paces, "more fails by"]


def cells(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of each way."""
    for row in result["ways"].values():
        known = row["seconds"] is not None
        yield [
            row["title"],
            str(row["largest"]),
            f"{row['over_plain']:.2f}",
            format_seconds(row["seconds"]) if known else "",
            f"{row['seconds_over_plain']:.2f}" if known else "",
            *(str(row["within"][f"{pace:g}"]) for pace in PACES),
            row["ended_by"],
        ]


def show(title: str, unit: str, result: Mapping[str, Any]) -> None:
    """Print one search as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    first, *middle, last = heads(unit)
    table.add_column(first)
    for head in middle:
        table.add_column(head, justify="right")
    table.add_column(last, overflow="fold")
    for row in cells(result):
        table.add_row(*row)
    console = Console(width=max(Console().width, _WIDTH))
    console.print(table)
    console.print(_losses(result), highlight=False)


def table_of(unit: str, result: Mapping[str, Any]) -> list[str]:
    """Return one search as lines of Markdown."""
    columns = heads(unit)
    marks = ["---", *["---:"] * (len(columns) - 2), "---"]
    table = [f"| {' | '.join(row)} |" for row in (columns, marks, *cells(result))]
    return [*table, "", f"- {_losses(result)}"]


def _losses(result: Mapping[str, Any]) -> str:
    equal = "equal, bit for bit" if result["losses_equal"] else "NOT EQUAL: see the JSON"
    return f"losses of ways that made steps of one size: {equal}"


def draw(
    figure: Figure, color: Mapping[str, str], found: Sequence[tuple[str, str, Mapping[str, Any]]]
) -> None:
    """Draw searches below each other: how large each way gets, and at what pace.

    Args:
        figure: an empty one.
        color: the canvas's colours.
        found: title, unit and result of each.
    """
    every = figure.subplots(len(found), 2, squeeze=False)
    for (left, right), (title, unit, result) in zip(every, found, strict=True):
        _bars(left, color, title, result)
        _paces(right, color, unit, result)


def _bars(axes: Axes, color: Mapping[str, str], title: str, result: Mapping[str, Any]) -> None:
    ways = list(result["ways"].items())[::-1]
    values = [row["over_plain"] for _, row in ways]
    shades = [color[_SHADES[key][0]] for key, _ in ways]
    bars = axes.barh([row["title"] for _, row in ways], values, color=shades)
    labels = [f"{row['over_plain']:.1f}x ({row['largest']})" for _, row in ways]
    axes.bar_label(bars, labels=labels, padding=4)
    axes.set_xlim(0, 1.4 * max(values))
    axes.set_title(title, loc="left")
    axes.set_xlabel("largest, times that of plain training")


def _paces(axes: Axes, color: Mapping[str, str], unit: str, result: Mapping[str, Any]) -> None:
    for key, row in result["ways"].items():
        shade, mark = _SHADES[key]
        made = [one for one in row["tries"] if one["seconds"]]
        axes.plot(
            [one["size"] for one in made],
            [one["pace"] for one in made],
            marker=mark,
            markersize=4.5,
            linewidth=1.2,
            color=color[shade],
            label=row["title"],
        )
        refused = [one["size"] for one in row["tries"] if not one["seconds"]]
        if refused and made:
            axes.plot(min(refused), made[-1]["pace"], "x", markersize=7, color=color[shade])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"{unit} (× cannot run)")
    axes.set_ylabel("step, times plain training's pace")
    axes.legend(frameon=False, fontsize=7)
