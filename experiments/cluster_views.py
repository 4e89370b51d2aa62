"""Tables and the figure of `dynoffload.experiments.cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynoffload.experiments.comparing import Table
from dynoffload.planning.strategies import Strategy
from dynoffload.simulation.pipeline import Part, backward, forward
from dynoffload.simulation.streams import Resource

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = ("2", "4", "8")
_SEGMENTS = {
    "even_s": ("compute of all else", "compute"),
    "experts_s": ("experts of the busiest rank", "evict"),
    "exposed_s": ("exposed communication and copies", "optimizer"),
}
_PAINT = {Resource.COMPUTE: "compute", Resource.LINK: "optimizer", Resource.COPY: "fault"}
_LAYER_PAINT = {"GPT-S": "plan", "BERT-L": "backward", "GPT-XL": "stall"}


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return all tables."""
    return [make(result) for make in (_cases, _strategies, _layers, _batches, _memory)]


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return what stands between the marks of a page."""
    return [
        line for one in tables(result) for line in (f"**{one.title}.**", "", *one.markdown(), "")
    ][:-1]


def row_of(case: Mapping[str, Any], parts: int, strategy: str) -> Mapping[str, Any]:
    """Return one step of a case."""
    found: Mapping[str, Any] = next(
        row for row in case["rows"] if (row["parts"], row["strategy"]) == (parts, strategy)
    )
    return found


def _cases(result: Mapping[str, Any]) -> Table:
    rows = []
    for case in result["steps"]:
        plain = row_of(case, 1, "none")
        shared = [row for row in case["rows"] if row["strategy"] != "none" and row["parts"] > 1]
        best = min(shared, key=lambda row: row["seconds"])
        rows.append(
            [
                case["network"],
                str(case["sequences"]),
                f"{case['routing']} ({case['busiest']:.1f}x)",
                _ms(plain["seconds"]),
                f"{plain['link_share']:.0%}",
                f"{plain['waiting_s'] / plain['seconds']:.0%}",
                *(_ms(row_of(case, int(parts), "none")["seconds"]) for parts in _PARTS),
                f"{_ms(best['seconds'])} (n={best['parts']}, {best['strategy']})",
                f"{plain['kept_gb']:.2f}",
                f"{best['kept_gb']:.2f}",
            ]
        )
    columns = (
        *("network", "sequences", "routing (busiest rank)", "ms, n=1", "on the link"),
        *("waiting", "n=2", "n=4", "n=8", "best with shared buffers", "kept GB, n=1", "kept GB"),
    )
    return Table("A step of the 1T network on 256 GPUs", columns, rows)


def _strategies(result: Mapping[str, Any]) -> Table:
    case = last_even(result)
    rows = [
        [
            f"{row['parts']}",
            row["strategy"],
            *(_ms(row[key]) for key in ("seconds", "expert_layers_s", "bound_s")),
            f"{row['link_share']:.0%}",
            f"{row['exposed_share']:.0%}",
            f"{row['kept_gb']:.2f}",
        ]
        for row in case["rows"]
    ]
    columns = (
        *("n", "strategy", "step ms", "expert layers ms", "their bound ms"),
        *("on the link", "exposed", "kept GB"),
    )
    title = f"Every n and strategy: {case['network']}, {case['sequences']} sequences, even routing"
    return Table(title, columns, rows, (0, 1))


def last_even(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the largest batch on nodes, evenly routed."""
    even = [c for c in result["steps"] if (c["network"], c["routing"]) == ("nodes", "even")]
    found: Mapping[str, Any] = max(even, key=lambda case: case["sequences"])
    return found


def _layers(result: Mapping[str, Any]) -> Table:
    rows = []
    for name, shares in result["layers"].items():
        for row in shares:
            speedup = row["speedup"]
            shared = {
                (parts, strategy): speedup[strategy][parts]
                for strategy in speedup
                for parts in _PARTS
                if strategy != "none"
            }
            best = max(shared, key=lambda key: shared[key])
            rows.append(
                [
                    name,
                    f"{row['share']:.0%}",
                    f"{row['network_gb']:.3g}",
                    *(f"{speedup['none'][parts]:.2f}" for parts in _PARTS),
                    f"{shared[best]:.2f} (n={best[0]}, {best[1]})",
                ]
            )
    columns = ("layer", "link's share", "GB/s", "n=2", "n=4", "n=8", "best with shared buffers")
    return Table("Times the speed of the unpipelined layer", columns, rows)


def _batches(result: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"{row['tokens']:,}",
            *(f"{seconds * 1e3:.2f}" for seconds in row["seconds"].values()),
            str(row["best"]),
        ]
        for row in result["best_parts"]
    ]
    columns = ("tokens of a rank", "ms, n=1", "n=2", "n=4", "n=8", "best n")
    return Table("GPT-XL by its batch, half of a large one on the link", columns, rows)


def _memory(result: Mapping[str, Any]) -> Table:
    rows = [
        [row["layer"], f"{row['tokens']:,}", *(f"-{row['saved'][parts]:.0%}" for parts in _PARTS)]
        for row in result["memory"]
    ]
    published = result["published"]["memory"]
    rows.append(["published", "", *(f"-{published[parts]:.0%}" for parts in _PARTS)])
    columns = ("layer", "tokens of a rank", "n=2", "n=4", "n=8")
    return Table("Memory of a layer, by the formula, against one part", columns, rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the figure to ``path``, which ends in ``.svg`` or ``.png``."""
    from dynoffload.reporting.canvas import write_figure

    def on(figure: Figure, color: Mapping[str, str]) -> None:
        rows: Any = figure.subfigures(3, 1, height_ratios=[3.2, 2.6, 2.8])
        top, middle, bottom = rows
        _bars(top, result, color)
        speed, memory = middle.subplots(1, 2, width_ratios=[1.6, 1])
        _speedups(speed, result, color)
        _saved(memory, result, color)
        _gantt(bottom, color)

    write_figure(on, path, height=11)


def _bars(figure: Any, result: Mapping[str, Any], color: Mapping[str, str]) -> None:
    """Draw steps by n, one group for each case; batches have axes of their own."""
    batches = list(dict.fromkeys(case["sequences"] for case in result["steps"]))
    every = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, sequences in zip(every, batches, strict=True):
        cases = [case for case in result["steps"] if case["sequences"] == sequences]
        ticks: list[float] = []
        names: list[str] = []
        for place, case in enumerate(cases):
            for side, parts in enumerate((1, 2, 4, 8)):
                row, x, bottom = row_of(case, parts, "none"), 5.2 * place + side, 0.0
                for key, (label, paint) in _SEGMENTS.items():
                    height = row[key] * 1e3
                    axes.bar(
                        x,
                        height,
                        0.86,
                        bottom,
                        color=color[paint],
                        label=label if not ticks else "",
                    )
                    bottom += height
                ticks.append(x)
                names.append(str(parts))
            axes.annotate(
                f"{case['network']}, {case['routing']}",
                (5.2 * place + 1.5, 0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -27),
                textcoords="offset points",
                ha="center",
                color=color["muted"],
            )
        axes.set_xticks(ticks, names)
        axes.tick_params(axis="x", length=0)
        plural = "s" if sequences > 1 else ""
        axes.set_title(
            f"1T on 256 GPUs, {sequences} sequence{plural} a group, by n", loc="left", fontsize=8.5
        )
    every[0].set_ylabel("ms of a step")
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False)


def _speedups(axes: Axes, result: Mapping[str, Any], color: Mapping[str, str]) -> None:
    for name, rows in result["layers"].items():
        x = [100 * row["share"] for row in rows]
        for parts, style in zip(_PARTS, (":", "--", "-"), strict=True):
            y = [row["speedup"]["none"][parts] for row in rows]
            label = f"{name}, n = {parts}"
            axes.plot(x, y, style, color=color[_LAYER_PAINT[name]], linewidth=1.4, label=label)
    axes.axhline(1, color=color["muted"], linewidth=0.8)
    axes.set_title("layer against itself in one part, none restored", loc="left", fontsize=8.5)
    axes.set_xlabel("% of the unpipelined layer on the link")
    axes.set_ylabel("times as fast")
    axes.legend(frameon=False, ncols=1, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _saved(axes: Axes, result: Mapping[str, Any], color: Mapping[str, str]) -> None:
    places = range(len(_PARTS))
    for name, paint in _LAYER_PAINT.items():
        rows = [row for row in result["memory"] if row["layer"] == name]
        offset = 0.22 * (list(_LAYER_PAINT).index(name) - 1)
        for place, parts in zip(places, _PARTS, strict=True):
            values = [100 * row["saved"][parts] for row in rows]
            axes.plot(
                [place + offset] * len(values),
                values,
                "-o",
                color=color[paint],
                markersize=3.5,
                linewidth=1,
                label=name if place == 0 else "",
            )
    published = result["published"]["memory"]
    for place, parts in zip(places, _PARTS, strict=True):
        axes.plot(
            [place - 0.38, place + 0.38],
            [100 * published[parts]] * 2,
            "--",
            color=color["ink"],
            linewidth=1.2,
            label="published" if place == 0 else "",
        )
    axes.set_xticks(list(places), [f"n = {parts}" for parts in _PARTS])
    axes.set_ylim(0)
    axes.set_ylabel("% of memory saved")
    tokens = sorted({row["tokens"] for row in result["memory"]})
    title = f"memory by the formula, {tokens[0]:,} to {tokens[-1]:,} tokens"
    axes.set_title(title, loc="left", fontsize=8.5)
    axes.legend(frameon=False, fontsize=7)


def _gantt(figure: Any, color: Mapping[str, str]) -> None:
    """Draw both passes of four parts under S3, products, exchanges and copies as 2, 2 and 0.75."""
    one = np.ones(1)
    part = Part(one, 1.2, 1.2, 0.75 * one, 3 * one, 0 * one, 0 * one)
    for axes, make, name in zip(
        figure.subplots(1, 2, width_ratios=[1, 1.6]),
        (forward, backward),
        ("forward", "backward"),
        strict=True,
    ):
        for task in make(part, 4, Strategy.S3).tasks:
            start, end = task.start[0], task.end[0]
            y = 2 - task.resource.value
            paint = color[_PAINT[task.resource]]
            axes.barh(y, end - start, 0.7, start, color=paint, edgecolor=color["paper"])
            if end - start > 0.9:
                text = task.name.replace(" again", "'").replace(" backward", "")
                text = text.replace("first", "a").replace("second", "b").replace(" ", "")
                axes.text(
                    (start + end) / 2,
                    y,
                    text,
                    ha="center",
                    va="center",
                    color=color["paper"],
                    fontsize=6.5,
                )
        axes.set_yticks([2, 1, 0], ["compute", "link", "copy"])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("time, in units of one product")
        title = f"{name} of four parts under S3: it fills, and drains"
        axes.set_title(title, loc="left", fontsize=8.5)
