"""The table and the figure of `dynoffload.experiments.simulation`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.experiments import comparing
from dynoffload.experiments.comparing import Table, draw_diagonal, marked, write_between

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP_MEDIAN, STEP_WORST, BYTES_WORST = 0.10, 0.20, 0.02
"""Relative errors that are asked for."""
_COLUMNS = (
    *("network", "budget", "policy", "real ms", "simulated ms", "error"),
    *("real MB in", "out", "simulated MB in", "out", "error", "runs differ by"),
)


def show(result: Mapping[str, Any]) -> None:
    """Print the table and what is to be said of it."""
    comparing.show(_table(result), *said(result))


def _table(result: Mapping[str, Any]) -> Table:
    rows = [cells(row) for row in result["settings"]]
    return Table("real and simulated steps", _COLUMNS, rows, (0, 2))


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return one setting's row; what misses what is asked for is marked."""
    real, ours = row["real"], row["simulated"]
    return [
        row["network"],
        f"{row['share']:.3g}",
        row["policy"],
        f"{real['seconds'] * 1e3:.0f}",
        f"{ours['seconds'] * 1e3:.0f}",
        marked(row["seconds_error"], STEP_WORST),
        *(f"{one[key] / 1e6:.1f}" for one in (real, ours) for key in ("bytes_in", "bytes_out")),
        marked(row["bytes_error"], BYTES_WORST),
        f"{row['bytes_spread']:.1%}",
    ]


def said(result: Mapping[str, Any]) -> list[str]:
    """Return what was asked for, and whether it holds."""
    found, holds = result["summary"], result["summary"]["holds"]

    def verdict(key: str) -> str:
        return "holds" if holds[key] else "missed"

    return [
        f"step time: median error {found['seconds_median']:.1%} (at most {STEP_MEDIAN:.0%}: "
        f"{verdict('seconds_median')}), worst {found['seconds_worst']:.1%} (at most "
        f"{STEP_WORST:.0%}: {verdict('seconds_worst')}), {found['seconds_within']} of "
        f"{found['settings']} settings within {STEP_WORST:.0%}",
        f"bytes moved: median error {found['bytes_median']:.1%}, worst {found['bytes_worst']:.1%} "
        f"(at most {BYTES_WORST:.0%}: {verdict('bytes_worst')}), {found['bytes_within']} of "
        f"{found['settings']} settings within {BYTES_WORST:.0%}",
    ]


def write_table(result: Mapping[str, Any], page: Path) -> None:
    """Write the table of a page anew, between its marks.

    Raises:
        ConfigError: the page does not have them.
    """
    write_between(page, [*_table(result).markdown(), "", *(f"- {line}" for line in said(result))])


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """Draw simulated against real, seconds and bytes."""
    from dynoffload.reporting.canvas import write_figure as write

    write(lambda figure, color: _draw(figure, color, result), path, height=4.6)


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    shades = {"pilot": "plan", "repeat": "compute", "on-demand": "fault"}
    panels = figure.subplots(1, 2)
    kinds = (("ms per step", STEP_WORST, _ms), ("MB moved per step", BYTES_WORST, _moved))
    for axes, (label, most, value) in zip(panels, kinds, strict=True):
        points = [
            (value(row["real"]), value(row["simulated"]), row["policy"])
            for row in result["settings"]
        ]
        draw_diagonal(axes, color, [one for p in points for one in p[:2]], most)
        for policy, shade in shades.items():
            mine = [(x, y) for x, y, one in points if one == policy]
            if not mine:
                continue
            axes.scatter(*zip(*mine, strict=True), color=color[shade], s=22, label=policy, zorder=3)
        axes.set_xlabel(f"real, {label}")
        axes.set_ylabel("simulated")
    panels[0].legend(frameon=False)


def _ms(one: Mapping[str, float]) -> float:
    return one["seconds"] * 1e3


def _moved(one: Mapping[str, float]) -> float:
    return (one["bytes_in"] + one["bytes_out"]) / 1e6
