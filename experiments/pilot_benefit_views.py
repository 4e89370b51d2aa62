"""The table, the figure and the page of `dynoffload.experiments.pilot_benefit`.

What it is: its numbers as people read them. What it is not: their measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ASKED: dict[str, tuple[float, str]] = {
    "stall_over_on_demand": (0.25, "waiting, over on demand"),
    "stall_over_recorded": (0.5, "waiting, over the recorded order"),
    "step_over_clairvoyant": (1.05, "step, over the clairvoyant's"),
    "wasted": (0.10, "fetched in vain"),
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
    *("network", "paths", "budget", "run", "step", "waiting", "in vain", "on demand", "order"),
    "losses",
)
_ASKED_HEADS = (
    "network",
    *(title for _, title in ASKED.values()),
    "median step, over the clairvoyant's",
    "step, over on demand",
    "clairvoyant's waiting, over on demand",
    "largest update, over the budget",
)


def show(result: Mapping[str, Any]) -> None:
    """Print the tables and what is to be said of them."""
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
                    format_seconds(run["stall_total_s"] / run["steps"]),
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
        ratios = case["ratios"]
        cells = [
            "–" if ratios[key] is None else f"{ratios[key]:.2f}{_told(ratios, key, most)}"
            for key, (most, _) in ASKED.items()
        ]
        best = ratios["clairvoyant_stall_over_on_demand"]
        steps = (ratios["medians_over_clairvoyant"], ratios["step_over_on_demand"])
        known = [*(f"{ratio:.2f}" for ratio in steps), "–" if best is None else f"{best:.2f}"]
        known.append(f"{case['largest_update_bytes'] / case['budget_bytes']:.2f}")
        rows.append([case["title"], *cells, *known])
    return rows


def _told(ratios: Mapping[str, Any], key: str, most: float) -> str:
    """Return what stands beside a ratio: its range if it has one, and whether it was missed."""
    low, high = ratios.get(f"{key}_range") or (None, None)
    within = "" if low is None else f" [{low:.2f}, {high:.2f}]"
    return within + (" (missed)" if ratios[key] > most else "")


def said(result: Mapping[str, Any]) -> list[str]:
    """Return what was asked for, and where it holds."""
    lines = []
    for key, (most, title) in ASKED.items():
        known = {
            case["title"]: case["ratios"][key]
            for case in result["cases"].values()
            if case["ratios"][key] is not None
        }
        missed = [name for name, ratio in known.items() if ratio > most]
        where = f"; not: {', '.join(missed)}" if missed else ""
        asked = f"{title}: at most {most:g}: {len(known) - len(missed)} of {len(known)}{where}"
        lines.append(asked)
    return lines


def write_page(result: Mapping[str, Any], page: Path, json_path: Path | None) -> None:
    """Write the page as Markdown; the figure lies beside the numbers."""
    figure = ""
    if json_path is not None:
        drawn = json_path.with_suffix(".svg")
        seen = drawn.name if drawn.parent == page.parent else drawn.as_posix()
        figure = f"\n![Waiting by network and policy]({seen})\n"
    told = "\n".join(f"- {line}" for line in said(result))
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

Networks of the zoo at their `{result["size"]}` sizes are trained by AdamW, one sample a step, under
an eighth of their footprint, or a fifth to a half where an update and what runs beside it would not
fit that: {budgets}. Pilots
(`{result["model"]}`) learned from {result["samples"]} recorded steps on other files. All runs make
the same steps on the same samples, in processes that take turns; their losses are compared bit by
bit with plain PyTorch's.

- *on demand* fetches what is touched. *recorded* records one step and follows it to the letter,
  until one departs from it. *repeat* plans by the last order. *pilot* is the trained pilot,
  corrected within the forward by what runs and by what the network's routers say. *clairvoyant* is
  told, before each step, what it will run: a prediction that is right, in the same hands. It moves
  bytes in vain as well, as room it is planned with comes late; so others may do better.
- *paths*: how many of the steps differed from each other in what they visited.
- *waiting*: seconds of a step spent waiting for bytes, mean. *in vain*: share of the bytes fetched
  ahead that nobody used. *order*: block-order accuracy before the first operator.
- *largest update*: the weights, gradients and two moments of one module, which its update uses at
  once. While it is made, no more than the rest of the budget can be fetched ahead, whoever
  foretells what comes.
- *step, over*: each step over the other run's on the same sample, the median; over the
  clairvoyant's with the range in which nine of ten medians lie when samples are drawn anew, and
  without the samples on which one of the two fetched nothing ahead (– if that was all of them).
  *median step* is the ratio of the two medians, which steps of many sizes make uncertain.
- Of each run {steps} steps are measured, after {warmup}: a session that waits long soon tries
  whether prefetch pays, with some steps on demand. *on demand*, of a run that fetches ahead: how
  many of the measured steps fetched nothing ahead, in such a trial or after one that prefetch lost.

## What was asked

{told}
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
    """Draw how long each run waits and steps, over on demand."""
    from dynoffload.reporting.canvas import write_figure as write

    height = 1.4 + 0.75 * len(result["cases"])
    write(lambda figure, color: _draw(figure, color, result), path, height=height)


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, color, result, "stall_total_s", "seconds waited, over on demand")
    _bars(right, color, result, "step_s", "seconds of a step, over on demand")
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
