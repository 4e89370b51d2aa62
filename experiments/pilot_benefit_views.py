"""The ratios, tables, figure and page of `dynoffload.experiments.pilot_benefit`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ASKED: dict[str, tuple[float, str]] = {
    "stall_over_on_demand": (0.25, "stall over on demand"),
    "stall_over_recorded": (0.5, "stall over recorded"),
    "step_over_clairvoyant": (1.05, "step over clairvoyant"),
    "wasted": (0.10, "wasted prefetch"),
}
"""The most that each ratio of the pilot's run is asked to be, and what tables call it."""

_SHADES = {
    "on_demand": "fault",
    "recorded": "evict",
    "repeat": "rss",
    "pilot": "plan",
    "clairvoyant": "optimizer",
}
_WIDTH = 150  # of the table, where the output is no terminal
_HEADS = (
    *("network", "paths", "budget", "run", "step", "stall", "wasted", "on demand", "order"),
    "losses",
)
BESIDE: dict[str, str] = {
    "step_over_plain": "step over plain",
    "step_over_repeat": "step over repeat-last",
    "step_over_on_demand": "step over on demand",
    "stall_over_repeat": "stall over repeat-last",
    "clairvoyant_stall_over_on_demand": "clairvoyant's stall over on demand",
}
"""Ratios without an aim, and what tables call them."""
_ASKED_HEADS = (
    *("network", *BESIDE.values()),
    *(title for _, title in ASKED.values()),
    "largest update over the budget",
)


def show(result: Mapping[str, Any]) -> None:
    """Print the tables and the aims."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, _WIDTH))
    for heads, rows in ((_HEADS, _rows(result)), (_ASKED_HEADS, _asked(result))):
        table = Table(box=None)
        for head in heads:
            table.add_column(head, justify="left" if head in ("network", "run") else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in said(result):
        console.print(line, highlight=False, markup=False)


def ratios(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the pilot's run is compared by; None where there is nothing to divide by.

    Times are medians over steps, or medians of ratios on the same sample. Stalls are sums over all
    steps, by which the aims were set.
    """
    runs = case["runs"]
    pilot = runs["pilot"]

    def stalls(key: str, run: Mapping[str, Any] = pilot) -> float | None:
        stalled: float = runs[key]["stall_total_s"]
        return run["stall_total_s"] / stalled if stalled else None

    fetched = pilot["prefetched_bytes"]
    over = paired(pilot, runs["clairvoyant"], both=True)
    return {
        "clairvoyant_stall_over_on_demand": stalls("on_demand", runs["clairvoyant"]),
        "stall_over_on_demand": stalls("on_demand"),
        "stall_over_recorded": stalls("recorded"),
        "stall_over_repeat": stalls("repeat"),
        "step_over_plain": pilot["step_s"] / runs["plain"]["step_s"],
        "step_over_repeat": _median(paired(pilot, runs["repeat"])),
        "step_over_on_demand": _median(paired(pilot, runs["on_demand"])),
        "step_over_clairvoyant": _median(over),
        "step_over_clairvoyant_range": over[1:] if over else None,
        "medians_over_clairvoyant": pilot["step_s"] / runs["clairvoyant"]["step_s"],
        "wasted": pilot["wasted_bytes"] / fetched if fetched else None,
    }


def _median(found: tuple[float, float, float] | None) -> float | None:
    return None if found is None else found[0]


def paired(
    run: dict[str, Any], other: dict[str, Any], *, both: bool = False
) -> tuple[float, float, float] | None:
    """Return how much longer the steps of one run took, each over the other's on the same sample.

    Args:
        run: the one.
        other: the other.
        both: leave out the samples on which one of them fetched nothing ahead, as in a trial.

    Returns:
        The median, which samples of many sizes leave alone, and the range in which nine of ten
        medians lie when the samples are drawn anew (bootstrap); None if all are left out.
    """
    ratios = np.array(run["each_step_s"]) / np.array(other["each_step_s"])
    if both:
        ahead = np.array(run["each_prefetched"]) * np.array(other["each_prefetched"], float)
        ratios = ratios[ahead > 0]
    if not len(ratios):
        return None
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.05, 0.95))
    return float(np.median(ratios)), float(low), float(high)


def _rows(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for case in result["cases"].values():
        head = [case["title"], f"{case['paths']} in {case['steps']}", f"{case['share']:.1%}"]
        rows.append([*head, "plain", format_seconds(case["runs"]["plain"]["step_s"]), *["–"] * 5])
        for key in _SHADES:
            run = case["runs"][key]
            fetched = run["prefetched_bytes"]
            rows.append(
                [
                    *["", "", ""],
                    key.replace("_", " "),
                    format_seconds(run["step_s"]),
                    format_seconds(run["stall_s"]),
                    f"{run['wasted_bytes'] / fetched:.1%}" if fetched else "–",
                    "–" if key == "on_demand" else f"{run['steps_on_demand']} of {run['steps']}",
                    "–" if run["accuracy"] is None else f"{run['accuracy']:.1%}",
                    _losses(case, run),
                ]
            )
    return rows


def _losses(case: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    if not case["repeatable"]:
        return "plain differs from plain"
    return "equal" if run["losses_equal"] else "NOT EQUAL"


def _asked(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for case in result["cases"].values():
        found = ratios(case)
        beside = ["–" if found[key] is None else f"{found[key]:.2f}" for key in BESIDE]
        aims = [
            "–" if found[key] is None else f"{found[key]:.2f}{_beside_aim(found, key, most)}"
            for key, (most, _) in ASKED.items()
        ]
        share = f"{case['largest_update_bytes'] / case['budget_bytes']:.2f}"
        rows.append([case["title"], *beside, *aims, share])
    return rows


def _beside_aim(found: Mapping[str, Any], key: str, most: float) -> str:
    """Return the range of a ratio, if it has one, and whether its aim was missed."""
    low, high = found.get(f"{key}_range") or (None, None)
    within = "" if low is None else f" [{low:.2f}, {high:.2f}]"
    return within + (" (missed)" if found[key] > most else "")


def said(result: Mapping[str, Any]) -> list[str]:
    """Return each aim, and in how many networks it is reached."""
    every = {case["title"]: ratios(case) for case in result["cases"].values()}
    lines = []
    for key, (most, title) in ASKED.items():
        known = {name: found[key] for name, found in every.items() if found[key] is not None}
        missed = [name for name, ratio in known.items() if ratio > most]
        where = f"; missed: {', '.join(missed)}" if missed else ""
        lines.append(f"{title} ≤ {most:g}: {len(known) - len(missed)} of {len(known)}{where}")
    return lines


def write_page(result: Mapping[str, Any], page: Path, json_path: Path | None) -> None:
    """Write the page as Markdown; the figure lies beside the numbers."""
    figure = ""
    if json_path is not None:
        drawn = json_path.with_suffix(".svg")
        seen = drawn.name if drawn.parent == page.parent else drawn.as_posix()
        figure = f"\n![Stall by network and policy]({seen})\n"
    aims = "\n".join(f"- {line}" for line in said(result))
    budgets = ", ".join(
        f"{case['title']} {format_bytes(case['budget_bytes'])}" for case in result["cases"].values()
    )
    steps, warmup = result["steps"], result["warmup"]
    named = ("samples", "steps", "warmup", "size", "model")
    options = " ".join(f"--{name} {result[name]}" for name in named)
    if result.get("only"):
        options += f" --only {','.join(result['only'])}"
    page.write_text(
        f"""# What a prediction is worth

    dynoffload experiment pilot-benefit {options} --json PATH --page PATH.md

wrote this page.

## What is measured

Networks of the zoo at their `{result["size"]}` sizes are trained by AdamW, one sample a step. The
budget is an eighth of their footprint, or a fifth to a half where one update would not fit in an
eighth: {budgets}. Pilots
(`{result["model"]}`) are trained on {result["samples"]} recorded steps on other files. All runs
make the same steps on the same samples, in processes that take turns. Their losses are compared bit
by bit with plain PyTorch's.

- *plain*: PyTorch without a budget. *on demand*: no prefetch. *recorded*: one recorded order,
  followed to the letter until a step departs from it. *repeat*: the last order. *pilot*: the
  trained pilot, corrected within the forward by the blocks that ran and by the network's routers.
  *clairvoyant*: the true order of the step, known before it begins. It wastes prefetch too, as room
  that it planned with comes late; so another run may be faster.
- *paths*: distinct orders among the steps.
- *step*, *stall*: medians over the steps. *wasted*: share of the prefetched bytes that no operator
  used. *order*: block-order accuracy before the first operator, mean over the steps.
- *largest update*: weights, gradients and two moments of one module, which its update uses at once.
  While it is made, only the rest of the budget is left for prefetch, whatever the prediction.
- *step over* repeat-last, on demand and clairvoyant: medians of ratios on the same sample. Over the
  clairvoyant with the range of nine of ten medians when samples are drawn anew, without samples on
  which one of the two prefetched nothing (– if that was all). Step over plain is of medians.
- *stall over*: ratios of the sums over all steps, by which the aims were set. Ratios of the medians
  in the table of runs differ, most for the slimmable network.
- Each run measures {steps} steps after {warmup}. A session that stalls long soon tests whether
  prefetch pays, with some steps on demand. *on demand*, of a run that prefetches: measured steps
  without prefetch, in such a test or after prefetch lost one.

## Aims

{aims}
{figure}
{_markdown(_ASKED_HEADS, _asked(result))}

## The runs

{_markdown(_HEADS, _rows(result))}
""",
        encoding="utf-8",
    )


def _markdown(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    marks = ["---" if head in ("network", "run") else "---:" for head in heads]
    return "\n".join(f"| {' | '.join(line)} |" for line in ([*heads], marks, *rows))


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """Draw stall and step of each run, over on demand."""
    from dynoffload.reporting.canvas import write_figure as write

    height = 1.4 + 0.75 * len(result["cases"])
    write(lambda figure, color: _draw(figure, color, result), path, height=height)


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, color, result, "stall_total_s", "stall over on demand, sums")
    _bars(right, color, result, "step_s", "step over on demand, medians")
    left.axvline(ASKED["stall_over_on_demand"][0], color=color["budget"], linewidth=1, zorder=0)
    right.tick_params(labelleft=False)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(_SHADES), frameon=False)


def _bars(
    axes: Axes, color: Mapping[str, str], result: Mapping[str, Any], what: str, label: str
) -> None:
    shown = list(result["cases"].values())
    thick = 0.8 / len(_SHADES)
    for number, (key, shade) in enumerate(_SHADES.items()):
        axes.barh(
            [place + (number - 2) * thick for place in range(len(shown))],
            [case["runs"][key][what] / (case["runs"]["on_demand"][what] or 1.0) for case in shown],
            height=thick,
            color=color[shade],
            label=key.replace("_", " "),
        )
    axes.set_yticks(range(len(shown)), [case["title"] for case in shown])
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.grid(visible=True, axis="x")
