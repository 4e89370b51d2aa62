"""Tables and the figure of `dynoffload.experiments.memory_expansion`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.comparing import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

PUBLISHED: dict[str, float] = {
    "ratio_design1": 2.82,
    "ratio_design4": 1.48,
    "hbm_gb.conservative": 16.3,
    "hbm_gb.aggressive": 6.25,
    "remote_gb.conservative": 72.9,
    "remote_gb.aggressive": 82.9,
    "hbm_reduction": 0.616,
}
"""Figures of the paper, by the key of the JSON."""
SEGMENTS = {
    "compute_s": ("compute", "compute"),
    "exposed_local_s": ("exposed local", "evict"),
    "exposed_communication_s": ("exposed communication", "optimizer"),
    "exposed_remote_s": ("exposed remote", "fault"),
}
"""Key of the JSON -> label and colour, from the bottom of a bar to its top."""
LABELS = {"conservative": "C", "aggressive": "A"}
RATIOS = {1: "stall", 4: "plan"}
"""Designs whose ratio was published -> colour."""


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return all tables."""
    every = (_published_table, _steps, _capacity, _sensitivity, _planned_updates, _pools)
    return [make(result) for make in every]


def _published_table(result: Mapping[str, Any]) -> Table:
    rows = []
    for key, row in result["published"].items():
        value = row["value"]
        rows.append([key, f"{value:g}", f"{value * (1 + row['deviation']):.3g}", _percent(row)])
    for key in ("order_conservative", "order_aggressive"):
        rows.append([f"{key}, fastest first", "", _order(result[key]), ""])
    return Table("against the paper", ("published", "paper", "computed", "deviation"), rows)


def _steps(result: Mapping[str, Any]) -> Table:
    columns = ("design", "strategy", "movement", "ms", *(label for label, _ in SEGMENTS.values()))
    rows = [
        [
            f"{number} {design['name']}",
            strategy,
            name,
            *(f"{bar[key] * 1e3:.1f}" for key in ("seconds", *SEGMENTS)),
        ]
        for number, design in result["designs"].items()
        for strategy in LABELS
        for name, bar in design[strategy].items()
    ]
    return Table("a step", columns, rows, (0, 1, 2))


def _capacity(result: Mapping[str, Any]) -> Table:
    rows = [
        [
            name,
            strategy,
            *(f"{schedule[key][strategy]:.2f}" for key in ("hbm_gb", "remote_gb", "moved_gb")),
        ]
        for name, schedule in result["schedules"].items()
        for strategy in LABELS
    ]
    columns = ("movement", "strategy", "local GB", "remote GB", "moved GB")
    return Table("capacity", columns, rows, (0, 1))


def _sensitivity(result: Mapping[str, Any]) -> Table:
    columns = ("changed", "ratio 1", "ratio 4", "order C", "order A", "local GB C", "A")
    rows = [
        [
            changed(row),
            f"{row['ratio_design1']:.2f}",
            f"{row['ratio_design4']:.2f}",
            _order(row["order_conservative"]),
            _order(row["order_aggressive"]),
            *(f"{row['hbm_gb'][strategy]:.1f}" for strategy in LABELS),
        ]
        for rows in result["sensitivity"].values()
        for row in rows
    ]
    return Table("sensitivity, serial movement", columns, rows)


def _planned_updates(result: Mapping[str, Any]) -> Table:
    columns = ("optimizer I/O", "strategy", "local GB", *(f"design {n}" for n in result["designs"]))
    rows = [
        [
            row["update"],
            strategy,
            f"{row[strategy]['hbm_gb']:.2f}",
            *(f"{seconds * 1e3:.0f}" for seconds in row[strategy]["seconds"].values()),
        ]
        for row in result["planned_update"]
        for strategy in LABELS
    ]
    return Table("planned movement with optimizer I/O in each step, ms", columns, rows, (0, 1))


def _pools(result: Mapping[str, Any]) -> Table:
    columns = ("GPUs", "strategy", "GB/s at once", "at once", "in turns", "overlapped", "planned")
    rows = [
        [
            str(row["sharers"]),
            strategy,
            f"{row['gb_per_s_at_once']:.0f}",
            *(f"{bar['seconds'] * 1e3:.1f}" for bar in row[strategy].values()),
        ]
        for row in result["pooled"]
        for strategy in LABELS
    ]
    return Table("one pool for many GPUs, ms of a step", columns, rows, (1,))


def changed(row: Mapping[str, Any]) -> str:
    """Return what a row of the sensitivity changes, in words."""
    if "sequences" in row:
        count = row["sequences"]
        return f"{count} sequence{'s' if count > 1 else ''}"
    if "share" in row:
        return f"{100 * row['share']:g}% of a step hides movement"
    if "tensor" in row:
        return f"TP{row['tensor']} DP{row['data']} EP{row['expert']}×{row['slices']}"
    update, steps = row["update"], row["steps_per_update"]
    if update == "none":
        return "no optimizer I/O"
    return update if steps == 1 else f"{update}, 1 step in {steps}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the figure to ``path``, which ends in ``.svg`` or ``.png``."""
    from dynoffload.reporting.canvas import write_figure

    def on(figure: Figure, color: Mapping[str, str]) -> None:
        rows: Any = figure.subfigures(3, 1, height_ratios=[3.6, 2.8, 2.6])
        bars, middle, bottom = rows
        _bars(bars, result, color)
        batch, overlap, pool = middle.subplots(1, 3)
        _batch(batch, result, color)
        _overlap(overlap, result, color)
        _pooled(pool, result, color)
        division, update = bottom.subplots(1, 2, width_ratios=[1, 1.15])
        _dots(division, result["sensitivity"]["parallelism"], color, "parallelism")
        _dots(update, result["sensitivity"]["update"], color, "optimizer I/O in the step")

    write_figure(on, path, height=10.5)


def _bars(figure: SubFigure, result: Mapping[str, Any], color: Mapping[str, str]) -> None:
    designs = result["designs"]
    first, others = figure.subplots(1, 2, width_ratios=[1, 2.9])
    _group(first, {"1": designs["1"]}, color)
    _group(others, {number: designs[number] for number in designs if number != "1"}, color)
    first.set_ylabel("ms of a step")
    first.set_title("C conservative, A aggressive\n", loc="left", fontsize=8.5)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, frameon=False)


def _group(axes: Axes, designs: Mapping[str, Any], color: Mapping[str, str]) -> None:
    """Draw six bars for each design: three ways to move by two strategies."""
    ticks: list[float] = []
    top = 0.0
    for place, (number, design) in enumerate(designs.items()):
        left = 8.2 * place
        for group, schedule in enumerate(design["conservative"]):
            for side, strategy in enumerate(LABELS):
                ticks.append(left + 2.5 * group + side)
                bar = design[strategy][schedule]
                _bar(axes, ticks[-1], bar, color, named=len(ticks) == 1)
                top = max(top, bar["seconds"] * 1e3)
            _beside(axes, schedule, (left + 2.5 * group + 0.5, 0), (0, -25), color["muted"])
        name = f"({number}) {design['name']}"
        _beside(axes, name, (left + 3, 1), (0, 3), color["ink"], fontweight="bold")
    axes.set_ylim(0, top * 1.08)
    axes.set_xlim(-0.8, ticks[-1] + 0.8)
    axes.set_xticks(ticks, list(LABELS.values()) * (len(ticks) // 2))
    axes.tick_params(axis="x", length=0)


def _bar(
    axes: Axes, x: float, bar: Mapping[str, float], color: Mapping[str, str], *, named: bool
) -> None:
    """Draw the segments of a step on top of each other, and their sum."""
    bottom = 0.0
    for key, (label, paint) in SEGMENTS.items():
        height = bar[key] * 1e3
        axes.bar(x, height, 0.86, bottom, color=color[paint], label=label if named else "")
        bottom += height
    axes.annotate(
        f"{bottom:.0f}",
        (x, bottom),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        color=color["ink"],
        fontsize=7.5,
    )


def _beside(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    shift: tuple[float, float],
    color: str,
    **style: Any,
) -> None:
    """Write ``text`` centred on an edge: x in data, y as a share of the axes."""
    axes.annotate(
        text,
        at,
        xycoords=("data", "axes fraction"),
        xytext=shift,
        textcoords="offset points",
        ha="center",
        color=color,
        **style,
    )


def _batch(axes: Axes, result: Mapping[str, Any], color: Mapping[str, str]) -> None:
    rows = result["sensitivity"]["batch"]
    _ratios(axes, [row["sequences"] for row in rows], rows, color)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["sequences"] for row in rows], [str(row["sequences"]) for row in rows])
    axes.set_title("batch: sequences of a data-parallel group", loc="left", fontsize=8.5)
    axes.set_ylabel("aggressive / conservative")
    for number, paint in RATIOS.items():
        axes.annotate(
            f"design {number}",
            (rows[0]["sequences"], rows[0][f"ratio_design{number}"]),
            xytext=(9, 2),
            textcoords="offset points",
            color=color[paint],
            fontweight="bold",
        )
    axes.annotate(
        "dashed: published",
        (1, 1),
        xycoords="axes fraction",
        ha="right",
        va="top",
        color=color["muted"],
    )


def _overlap(axes: Axes, result: Mapping[str, Any], color: Mapping[str, str]) -> None:
    rows = result["sensitivity"]["overlap"]
    _ratios(axes, [100 * row["share"] for row in rows], rows, color)
    axes.set_title("overlap: % of a step that hides movement", loc="left", fontsize=8.5)


def _ratios(
    axes: Axes, x: list[float], rows: list[Mapping[str, Any]], color: Mapping[str, str]
) -> None:
    """Draw both ratios over ``x``, with the published ones as lines."""
    for number, paint in RATIOS.items():
        y = [row[f"ratio_design{number}"] for row in rows]
        axes.plot(x, y, color=color[paint], marker="o", markersize=3.5, linewidth=1.4)
    _published(axes.axhline, color)
    axes.set_ylim(0.9, None)


def _published(line: Any, color: Mapping[str, str]) -> None:
    for number, paint in RATIOS.items():
        value = PUBLISHED[f"ratio_design{number}"]
        line(value, color=color[paint], linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)


def _pooled(axes: Axes, result: Mapping[str, Any], color: Mapping[str, str]) -> None:
    rows = result["pooled"]
    x = [row["sharers"] for row in rows]
    shown = {
        "at_once": ("all at once", "stall"),
        "in_turns": ("in turns", "fault"),
        "overlapped": ("overlapped", "plan"),
        "planned": ("planned", "optimizer"),
    }
    for key, (label, paint) in shown.items():
        y = [row["aggressive"][key]["seconds"] * 1e3 for row in rows]
        axes.plot(x, y, color=color[paint], marker="o", markersize=3.5, linewidth=1.4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(count) for count in x])
    axes.set_ylim(0, None)
    axes.set_title("GPUs on one pool of 2048 GB/s: ms, aggressive", loc="left", fontsize=8.5)
    axes.legend(frameon=False, loc="upper left")


def _dots(axes: Axes, rows: list[Mapping[str, Any]], color: Mapping[str, str], title: str) -> None:
    """Draw both ratios of each row of a list, with the published ones as lines."""
    _published(axes.axvline, color)
    for place, row in enumerate(reversed(rows)):
        for number, paint in RATIOS.items():
            ratio = row[f"ratio_design{number}"]
            axes.plot(ratio, place, marker="o", markersize=5, color=color[paint])
            axes.annotate(
                f"{ratio:.2f}",
                (ratio, place),
                xytext=(6, 0) if number == 1 else (-6, 0),
                textcoords="offset points",
                ha="left" if number == 1 else "right",
                va="center",
                color=color[paint],
                fontsize=7.5,
                bbox={"facecolor": color["paper"], "edgecolor": "none", "pad": 1},
            )
    axes.set_yticks(range(len(rows)), [changed(row) for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0.9, max(row["ratio_design1"] for row in rows) + 0.35)
    axes.set_title(f"{title}: aggressive / conservative", loc="left", fontsize=8.5)


def _order(designs: list[int]) -> str:
    return " ".join(map(str, designs))


def _percent(row: Mapping[str, float]) -> str:
    return f"{row['deviation']:+.1%}"
