"""The table, the figure and the page of `dynoffload.experiments.pilot_accuracy`.

What it is: its numbers as people read them. What it is not: their computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.pilot_cases import CASES, DATA, STRUCTURE
from dynoffload.experiments.pilot_scores import BASELINES
from dynoffload.experiments.pilot_verdicts import (
    ARTIFACT_BYTES,
    DATA_AHEAD,
    DATA_START,
    LATENCY_S,
    NEAR_BEST,
    STRUCTURE_ORDER,
    STRUCTURE_WHOLE,
)
from dynoffload.pilot.models import KINDS
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TOLD = "block_order_accuracy"  # of what knows the sample only
_WIDTH = 170  # of the table, where the output is no terminal
_ORDER, _ALONE, _WHOLE, _AHEAD = "steering", "alone", "whole_order", "one_ahead"
_BYTES = "by_bytes"
_KNOWN_TITLE = "One block ahead, decision known"
_HEADS = (
    *("network", "pilot", "paths", "order", "whole order", "by bytes", "alone"),
    *("decision known", "last order", "most frequent", "recorded order", "asked"),
)
_BESIDE_HEADS = ("network", "pilot", *(name.replace("_", " ") for name in BASELINES))
_COST_HEADS = ("network", "prediction, median", "of 95%", "stored", "training")
_AGAIN_HEADS = (
    *("network", "1/8", "1/4", "1/2", "all", "gain of the last doubling", "best kind"),
    *("itself, nearer", "steps apart", "itself, farther", "steps apart"),
)
_ORIGINS = {
    STRUCTURE: "Structure that the sample shows",
    DATA: "Decided by what the network computes",
}

_Table = tuple[str, Sequence[str], list[list[str]]]
"""A title, heads and rows."""


def show(result: Mapping[str, Any]) -> None:
    """Print the tables and what is to be said of them."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, _WIDTH))
    for title, heads, rows in _tables(result):
        table = Table(title=title, title_justify="left", box=None)
        for number, head in enumerate(heads):
            table.add_column(head, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in said(result):
        console.print(line, highlight=False, markup=False)


def _tables(result: Mapping[str, Any]) -> list[_Table]:
    cases = result["cases"]
    tables: list[_Table] = [
        (
            title,
            _HEADS,
            [_row(case) for case in cases.values() if case["origin"] == origin],
        )
        for origin, title in _ORIGINS.items()
    ]
    tables += [
        ("By bytes", _BESIDE_HEADS, [_by_bytes(case) for case in cases.values()]),
        (_KNOWN_TITLE, _BESIDE_HEADS, [_ahead(case) for case in cases.values()]),
        ("What is left", _AGAIN_HEADS, [_again(case) for case in cases.values()]),
        ("What it takes", _COST_HEADS, [_cost(case) for case in cases.values()]),
    ]
    return [one for one in tables if one[2]]


def _row(case: Mapping[str, Any]) -> list[str]:
    found = case["summary"]
    pilot, verdict = found["pilot"], found["verdicts"]
    if verdict["reached"]:
        asked = "reached"
    else:
        asked = "missed, by any kind" if verdict["near_best"] else "missed"
    if verdict["beats_baselines"] is False:
        asked += ", no better than a baseline"
    elif verdict["beats_at_every_seed"] is False:
        asked += ", no better than a baseline at some seed"
    return [
        case["title"],
        "/".join(dict.fromkeys(found["chosen"])),
        f"{found['paths']['mean']:.0f}",
        *(_share(pilot[key]) for key in (_ORDER, _WHOLE, _BYTES, _ALONE, _AHEAD)),
        *(_share(found["baselines"][name][_ORDER]) for name in BASELINES),
        asked,
    ]


def _ahead(case: Mapping[str, Any]) -> list[str]:
    return _beside(case, _AHEAD)


def _by_bytes(case: Mapping[str, Any]) -> list[str]:
    return _beside(case, _BYTES)


def _beside(case: Mapping[str, Any], key: str) -> list[str]:
    found = case["summary"]
    baselines = (_share(found["baselines"][name][key]) for name in BASELINES)
    return [case["title"], _share(found["pilot"][key]), *baselines]


def _cost(case: Mapping[str, Any]) -> list[str]:
    pilot = case["summary"]["pilot"]
    return [
        case["title"],
        format_seconds(pilot["latency_s"]["max"]),
        format_seconds(pilot["latency_p95_s"]["max"]),
        format_bytes(int(pilot["artifact_bytes"]["max"])),
        format_seconds(pilot["training_s"]["mean"]),
    ]


def _again(case: Mapping[str, Any]) -> list[str]:
    found = case["summary"]
    curve = [point[_ORDER] for point in found["curve"]]
    gain = curve[-1]["mean"] - curve[-2]["mean"]
    best = max(found["kinds"], key=lambda kind: found["kinds"][kind][_ORDER]["mean"], default="")
    near, far = found["again"]["near"], found["again"]["far"]
    return [
        case["title"],
        *(f"{point['mean']:.1%}" for point in curve),
        f"{100 * gain:+.1f}",
        f"{best} {found['kinds'][best][_ORDER]['mean']:.1%}" if best else "–",
        *(
            text
            for one in (near, far)
            for text in (
                ("–", "–")
                if one is None
                else (f"{one[_TOLD]['mean']:.1%}", f"{one['steps_apart']['mean']:.0f}")
            )
        ),
    ]


def _share(found: Mapping[str, float] | None) -> str:
    """Return a mean share in percent, with half of its range over the seeds where there is one."""
    if found is None:
        return "–"
    half = (found["max"] - found["min"]) / 2
    return f"{found['mean']:.1%}" + (f" ±{100 * half:.1f}" if half > 5e-4 else "")


def said(result: Mapping[str, Any]) -> list[str]:
    """Return what was asked for, and where it holds."""
    verdicts = result["verdicts"]
    asked = {
        STRUCTURE: f"structure that the sample shows: order at least {STRUCTURE_ORDER:.0%} and "
        f"whole order at least {STRUCTURE_WHOLE:.0%}",
        DATA: f"decided by what the network computes: order at least {DATA_START:.0%} at the start "
        f"and {DATA_AHEAD:.0%} one block ahead, with routers' decisions known",
        "near_best": "of those that miss: no other kind is better than the chosen one by more "
        f"than {NEAR_BEST:.0%}, at the start and one block ahead",
        "beats_baselines": "better than every baseline, before the first operator, where there is "
        "more than one path",
        "beats_at_every_seed": "the same at each seed by itself",
        "latency": f"the median prediction at most {format_seconds(LATENCY_S)}",
        "artifact": f"stored in at most {ARTIFACT_BYTES / 1e6:.0f} MB",
    }
    lines = []
    for key, text in asked.items():
        found = verdicts.get(key)
        if found is None or not found["cases"]:
            continue
        missed = [result["cases"][case]["title"] for case in found["missed"]]
        where = f"; not: {', '.join(missed)}" if missed else ""
        lines.append(f"{text}: {found['held']} of {found['cases']}{where}")
    lines += [f"{name} failed: {why}" for name, why in result["failed"].items()]
    return lines


def _parts(result: Mapping[str, Any]) -> str:
    """Return the options by which a part of all was run."""
    cases = result["cases"]
    tried = {
        kind for case in cases.values() for one in case["seeds"].values() for kind in one["kinds"]
    }
    kinds = [kind for kind in KINDS if kind in tried]
    only = "" if set(cases) == set(CASES) else f" --only {','.join(cases)}"
    return only + (f" --kinds {','.join(kinds)}" if kinds and len(kinds) < len(KINDS) else "")


def page_of(result: Mapping[str, Any], figure: str) -> str:
    """Return the page as Markdown; ``figure`` is where the figure lies, seen from it, or ""."""
    tables = []
    for title, heads, rows in _tables(result):
        lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        told = "\n\n" + _ABOUT[title] if title in _ABOUT else ""
        tables.append(f"## {title}{told}\n\n{body}")
    told = "\n".join(f"- {line}" for line in said(result))
    seeds = f"{result['seeds']} seeds" if result["seeds"] > 1 else "one seed"
    drawn = f"\n![Accuracy by network, and over samples]({figure})\n" if figure else ""
    return f"""# How well pilots foretell block orders

    dynoffload experiment pilot-accuracy --seeds {result["seeds"]} --samples {result["samples"]}\
{_parts(result)} --json PATH --page PATH.md

wrote this page.

## What is scored

Every network of the zoo whose steps differ, at its smallest size, is trained by AdamW, one sample a
step, and {result["samples"]} steps of it are recorded (fewer where one takes a second). A quarter
of the sources (files, families, images) is held out. Each kind of pilot learns from the rest, and
the one that cross-validation there chooses is scored on what was held out: as `--model auto` would
do. All of it is done at {seeds}, which draw the weights, the samples, what is held out and the
pilots' training; a number is the mean over them, and ± half of their range.

- *order*: 1 - Levenshtein distance / length of the longer order, before the first operator, as the
  pilot steers: after each step of the training it is corrected by what that ran, as in a session.
  *whole order* and *by bytes* likewise. *alone*: from the sample, without that correction.
- *decision known*: share of the blocks that are named right while the block before them runs. By
  then a router or exit has made its decision, and the session reads it. So this is **no
  prediction** where a network has routers or exits: it shows that they were read in time. The
  baselines know only the blocks that ran before, so the two do not compare.
- *paths*: different orders among the steps. The masked encoder has one: what varies there is how
  long its inputs are, and any pilot has its order.
- *last order* repeats the order of the step before. *most frequent* is the one order that fits the
  training samples best. *recorded order* is a prefetcher that records one step, follows that to
  the letter, and after the first step that departs from it records anew. They see every step of
  the training, one by one; pilots learn from three quarters of them.
- *missed, by any kind*: and no other kind of pilot here is better by more than 1%. That others fail
  too does not make the rest noise: *What is left* tells how much of it is not.

## What came of it

{told}
{drawn}
{(chr(10) * 2).join(tables)}
"""


_ABOUT = {
    "What is left": """The learning curve of the chosen kind (order, on the same held-out samples):
where the last doubling of samples still gains, more samples would help; where it does not, more
samples would not. *itself*: the held-out samples, run once more through the network as it was some
steps before or after their own, the nearer and the farther half. How far it agrees with itself is
what is left to who sees the sample and has the very network, but of another moment.""",
    "What it takes": """The longest over the seeds. What is asked is asked of the median; beside it
the slowest twentieth of predictions, on a machine that did other work as well. *training* is one
fit of the kind that was chosen, on three quarters of the steps.""",
}


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """Draw the accuracy of each network, and learning curves."""
    from dynoffload.reporting.canvas import write_figure as write

    height = 2.2 + 0.3 * len(result["cases"])
    write(lambda figure, color: _draw(figure, color, result), path, height=height)


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_networks(left, color, list(result["cases"].values()))
    _draw_curves(right, color, list(result["cases"].values()))


_MARKS = {
    "last_order": ("fault", "v"),
    "most_frequent": ("rss", "s"),
    "recorded_order": ("evict", "^"),
}


def _draw_networks(
    axes: Axes, color: Mapping[str, str], cases: Sequence[Mapping[str, Any]]
) -> None:
    shown = {
        **{
            name.replace("_", " "): (mark, [c["summary"]["baselines"][name][_ORDER] for c in cases])
            for name, mark in _MARKS.items()
        },
        "pilot, at the start": (("plan", "o"), [c["summary"]["pilot"][_ORDER] for c in cases]),
        "decision known": (("optimizer", "D"), [c["summary"]["pilot"][_AHEAD] for c in cases]),
    }
    for label, ((shade, mark), spreads) in shown.items():
        means = [one["mean"] for one in spreads]
        below = [one["mean"] - one["min"] for one in spreads]
        above = [one["max"] - one["mean"] for one in spreads]
        axes.errorbar(
            means,
            range(len(cases)),
            xerr=[below, above],
            fmt=mark,
            color=color[shade],
            markersize=4.5,
            linewidth=1,
            label=label,
        )
    axes.set_yticks(range(len(cases)), [case["title"] for case in cases])
    axes.invert_yaxis()
    axes.grid(visible=True, axis="both")
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("block-order accuracy on held-out samples")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, frameon=False)


def _draw_curves(axes: Axes, color: Mapping[str, str], cases: Sequence[Mapping[str, Any]]) -> None:
    shades = ("plan", "fault", "optimizer", "stall", "backward", "compute", "evict", "rss", "ink")
    lines = ("-", "--", ":")
    for number, case in enumerate(c for c in cases if c["origin"] == DATA):
        curve = case["summary"]["curve"]
        axes.plot(
            [point["samples"]["mean"] for point in curve],
            [point[_ORDER]["mean"] for point in curve],
            color=color[shades[number % len(shades)]],
            linestyle=lines[number // len(shades) % len(lines)],
            marker="o",
            markersize=3,
            label=case["title"],
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("samples that are learned from")
    axes.set_ylabel("order, at the start")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
