"""The table, the figure and the page of `dynoffload.experiments.step_time`.

What it is: its numbers as people read them. What it is not: their measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.step_time_policies import PILOT, POLICIES, STOPPED
from dynoffload.experiments.step_time_rows import budget_name, is_tie, overall, said
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEADS = (
    *("budget", "policy", "measured", "times plain", "simulated", "times plain"),
    *("MB in", "out", "simulated MB in", "out", "losses equal"),
)
_NUMBER = re.compile(r"\d[\d.]*( [KMG]?i?B)?")
_WIDTH = 150  # of the table, where the output is no terminal
_SHADES = {
    "pilot": ("plan", "o"),
    "repeat": ("optimizer", "s"),
    "replay": ("backward", "^"),
    "on-demand": ("fault", "v"),
    "dtr": ("stall", "D"),
    "os-paging": ("ink", "P"),
    "intervals": ("rss", "<"),
    "capuchin": ("evict", ">"),
    "clairvoyant": ("compute", "*"),
}
"""Policy -> colour and mark."""


def show(result: Mapping[str, Any]) -> None:
    """Print a table for each network, and what is to be said of it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, _WIDTH))
    for network in result["networks"]:
        table = Table(title=_title(result, network), title_justify="left", box=None)
        for number, head in enumerate(_HEADS):
            table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
        for row in _rows(result, network):
            table.add_row(row["budget"], *cells(row)[1:])
        console.print(table)
    for line in (*reasons(result), *said(result)):
        console.print(line, highlight=False, markup=False)


def _rows(result: Mapping[str, Any], network: str) -> Iterator[Mapping[str, Any]]:
    return (row for row in result["rows"] if row["network"] == network)


def _title(result: Mapping[str, Any], network: str) -> str:
    about = result["networks"][network]
    return (
        f"{network}: {format_bytes(about['footprint_bytes'])} of parameters, gradients, state and "
        f"activations, {about['operators']} operators, {format_seconds(about['plain_s'])} a plain "
        "step"
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row's cells; a side that there is not is empty, one that cannot run says so."""
    policy = row["policy"]
    own = row["measured_s"], "measured"
    other = row["simulated_s"], "simulated"
    times = []
    for seconds, side in (own, other):
        if seconds is not None:
            times += [format_seconds(seconds), f"{row['over_plain'][side]:.2f}"]
        else:
            lacks = "only simulated" if side == "measured" else "not simulated"
            why = row["infeasible"][side]
            gave_up = "no end" if (why or "").endswith(STOPPED) else "cannot run"
            times += [gave_up if why else lacks, ""]
    moved = [
        "" if row[key][side] is None or policy == "plain" else f"{row[key][side] / 1e6:.1f}"
        for side in ("measured", "simulated")
        for key in ("bytes_in", "bytes_out")
    ]
    equal = {True: "yes", False: "NO", None: ""}[row["losses_equal"]]
    if row["infeasible"]["measured"] and equal == "yes":
        equal = "yes, so far"
    title = POLICIES[policy].title if policy in POLICIES else "plain, in memory"
    return [budget_name(row), title + (" *" if row["note"] else ""), *times, *moved, equal]


def reasons(result: Mapping[str, Any]) -> list[str]:
    """Return why what cannot run cannot, and the notes of rows. A reason that differs by no more
    than its numbers under other budgets is told for the first of them."""
    found = []
    told: dict[tuple[str, str], dict[str, list[tuple[str, str]]]] = {}
    for row in result["rows"]:
        if row["policy"] == "plain":
            continue
        title = POLICIES[row["policy"]].title
        for side, why in row["infeasible"].items():
            if why:
                same = told.setdefault((row["network"], _NUMBER.sub("", why)), {})
                same.setdefault(f"{title} ({side})", []).append((row["budget"], why))
        if row["note"]:
            found.append(f"{row['network']}, {row['budget']}, {title} *: {row['note']}")
    lines = []
    for (network, _), who in told.items():
        for each, where in who.items():
            (first, why), *others = where
            also = f"; so too under {', '.join(budget for budget, _ in others)}" if others else ""
            lines.append(f"{network}, {first}: {each}: {why}{also}")
    return lines + found


# Figure -------------------------------------------------------------------------------------------


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """Draw time over plain training's by budget, a panel for each network."""
    from dynoffload.reporting.canvas import write_figure as write

    path.parent.mkdir(parents=True, exist_ok=True)
    write(lambda figure, color: _draw(figure, color, result), path, height=5.4)


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    names = list(result["networks"])
    every = figure.subplots(
        2, len(names), squeeze=False, sharex="col", height_ratios=(3, 1), sharey="row"
    )
    shown = [key for key in _SHADES if any(row["policy"] == key for row in result["rows"])]
    for column, name in enumerate(names):
        rows = [row for row in _rows(result, name) if row["policy"] in _SHADES]
        _lines(every[0][column], color, rows)
        every[0][column].set_title(name, loc="left")
        _refused(every[1][column], color, rows, shown)
        _budget_axis(every[1][column], rows)
    every[0][0].set_ylabel("step, times plain in memory")
    figure.legend(
        handles=_handles(color, shown), loc="outside upper center", ncols=6, frameon=False
    )


def _lines(axes: Axes, color: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    for policy, (shade, mark) in _SHADES.items():
        own = [row for row in rows if row["policy"] == policy]
        for side, style in (("measured", "-"), ("simulated", "--")):
            # A gap where it cannot run, rather than a line across.
            xs = [row["budget_fraction"] for row in own]
            ys = [row["over_plain"][side] for row in own]
            values = [float("nan") if y is None else y for y in ys]
            if all(y is None for y in ys):
                continue
            axes.plot(
                xs,
                values,
                style,
                marker=mark,
                markersize=5,
                markerfacecolor=color[shade] if side == "measured" else color["paper"],
                color=color[shade],
                linewidth=1.4 if side == "measured" else 1.0,
            )
    axes.axhline(1.0, color=color["muted"], linewidth=0.8, linestyle=":")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")


def _refused(
    axes: Axes,
    color: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    shown: Sequence[str],
) -> None:
    """Mark under which budgets a policy cannot run."""
    for place, policy in enumerate(reversed(shown)):
        shade = color[_SHADES[policy][0]]
        for side, mark, size in (("measured", "x", 4.5), ("simulated", "o", 7.5)):
            xs = [
                row["budget_fraction"]
                for row in rows
                if row["policy"] == policy and row["infeasible"][side]
            ]
            axes.plot(
                xs,
                [place] * len(xs),
                mark,
                markersize=size,
                color=shade,
                markerfacecolor="none",
                markeredgewidth=1.1,
            )
    titles = [POLICIES[policy].title for policy in reversed(shown)]
    axes.set_yticks(range(len(shown)), titles, fontsize=6.5)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.set_title("cannot run: × measured, ○ simulated", loc="left", fontsize=8)


def _budget_axis(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    known = {row["budget_fraction"]: row["budget"] for row in rows}
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(known), list(known.values()))
    axes.set_xlim(1.3 * max(known), min(known) / 1.3)
    axes.minorticks_off()
    axes.set_xlabel("budget, of what training keeps")


def _handles(color: Mapping[str, str], shown: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=color[shade],
            linestyle="-" if POLICIES[key].runs else "--",
            marker=mark,
            markersize=5,
            markerfacecolor=color[shade if POLICIES[key].runs else "paper"],
            label=POLICIES[key].title,
        )
        for key, (shade, mark) in _SHADES.items()
        if key in shown
    ]
    ink = color["ink"]
    handles.append(Line2D([], [], color=ink, linestyle="-", label="measured"))
    handles.append(Line2D([], [], color=ink, linestyle="--", label="simulated"))
    return handles


# Page ---------------------------------------------------------------------------------------------


def _asked(result: Mapping[str, Any]) -> str:
    """Return the options that make the result."""
    lists = {
        "network": list(result["networks"]),
        "budgets": list(dict.fromkeys(row["budget"] for row in result["rows"])),
        "policies": list(result["policies"]),
    }
    said_once = " ".join(f"--{key} {','.join(names)}" for key, names in lists.items())
    numbers = ("preset", "steps", "repeat", "slowest", "learned")
    known = result["calibration"]
    last = "" if known is None else f" --calibration {known}"
    return said_once + "".join(f" --{key} {result[key]}" for key in numbers) + last


def _standings(result: Mapping[str, Any]) -> list[str]:
    """Return a table of who is fastest where, and how the pilot stands against the best other."""
    sides = ("measured", "simulated")
    heads = [
        head for side in sides for head in (f"fastest, {side}", "pilot against the best other")
    ]
    rows = [["network", "budget", *heads], ["---", "---", *["---", "---:"] * len(sides)]]
    for cell in result["summary"]["cells"]:
        row = [cell["network"], cell["budget"]]
        for side in sides:
            found = cell[side]
            ratio = None if found is None else found["ratio"]
            row += [
                "none runs" if found is None else _fastest(found),
                ""
                if ratio is None
                else f"{ratio:.2f} times as fast{', a tie' if is_tie(ratio) else ''}",
            ]
        rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]


def _fastest(found: Mapping[str, Any]) -> str:
    """Return who is fastest of one budget, with those that tie with it."""
    first = found["fastest"]
    times = {PILOT: 1.0, **found["ratios"]} if found["ratios"] else {first: 1.0}
    ties = [key for key, time in times.items() if key != first and is_tie(time / times[first])]
    return ", ".join(POLICIES[key].title for key in (first, *ties))


def _off(result: Mapping[str, Any]) -> str:
    """Return a table of how far simulated times are from measured ones."""
    rows = [["policy", "simulated as", "budgets", "median", "worst"], ["---"] * 2 + ["---:"] * 3]
    for policy, error in result["summary"]["errors"].items():
        how = "the runtime" if POLICIES[policy].strategy is None else "operators"
        numbers = [str(error["cells"]), f"{error['median']:.0%}", f"{error['worst']:.0%}"]
        rows.append([POLICIES[policy].title, how, *numbers])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_of(result: Mapping[str, Any], figure: str) -> str:
    """Return the page as Markdown; ``figure`` is where the figure lies, seen from it."""
    tables = []
    for network in result["networks"]:
        lines = [_HEADS, ("---", "---", *["---:"] * (len(_HEADS) - 2))]
        body = [f"| {' | '.join(one)} |" for one in (*lines, *map(cells, _rows(result, network)))]
        tables.append(f"### {_title(result, network)}\n\n" + "\n".join(body))
    why = "\n".join(f"- {line}" for line in reasons(result)) or "Every policy ran everywhere."
    told = "\n".join((*_standings(result), "", *(f"- {line}" for line in overall(result))))
    only = [one["title"] for one in result["policies"].values() if not one["measured"]]
    alone = f"Only simulated: {', '.join(only)}." if only else "Each policy has both sides."
    runs = "" if result["repeat"] == 1 else f" of {result['repeat']} runs"
    link = result["link"]
    return f"""# Time per step over budgets, policy by policy

    dynoffload experiment step-time {_asked(result)} --json PATH --page PATH.md

wrote this page.

## What is compared

Networks whose path changes from sample to sample, under budgets that are shares of what their
training keeps: parameters, gradients, optimizer state and what the largest step saves for backward.
Each policy trains for real (AdamW, one thread of compute) in a
process of its own, in turns with plain training and the others, on the same samples. A time is the
median of {result["steps"]} steps{runs} after warm-up, and its ratio is that to plain steps of the
same turns. The same steps are simulated from plain ones that were recorded, with the link as
measured ({link["read_bps"] / 1e9:.2f} GB/s in, {link["write_bps"] / 1e9:.2f} out) and with what the
runtime takes itself as fitted on other networks, scaled by its pace here; there the ratio is to the
recorded plain steps.
{alone}

Published for this way of offloading: up to {result["published"]} times as fast as other policies,
which are unified memory and dynamic tensor rematerialisation. Paging by the system stands for
unified memory here.

## What came of it

{told}

![Time over budgets]({figure})

*Time of a step over that of plain training, by budget; measured solid, simulated dashed.*

## All rows

{(chr(10) * 2).join(tables)}

## What cannot run, and what else is to be known

{why}

## How far the simulation is off

Of the time over plain training's, under the budgets that have both sides.

{_off(result)}

## How to read it

- The runtime is simulated as it moves regions of pages, with its own work: pilot, last order, on
  demand, and *clairvoyant*, which is the same runtime told every step: what a prediction could
  reach, and none of the policies that are ranked.
- The others are simulated operator by operator: every tensor moves by itself and pays the link's
  latency, and no work of a runtime's own is counted. Their times are those of a rule on this link,
  too short by that work and too long by those latencies; they are not ranked with the runtime's.
- Simulated paging is that of unified memory, by pages of 64 KiB for 30 microseconds each, over this
  link; what is measured is the system's paging to a swap file, whose limit also counts operators'
  temporaries and freed heap. Networks as small as these leave the system hardly any budget that it
  can page under; `experiment paged` measures it on a larger one.
- Below 1.1 times nobody is called faster: single steps of one policy differ by more.
- A simulated session never steps aside; a real one does where everything fits.
- A policy is stopped, measured or simulated, if a step takes {result["slowest"]:g} times what a
  plain one takes, and more than 10 s.
"""
