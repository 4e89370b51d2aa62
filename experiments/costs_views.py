"""Tables, figure and page of `dynoffload.experiments.costs`.

What it is: its numbers as people read them. What it is not: their measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REGIMES = {
    "samples": "held-out samples",
    "networks": "held-out networks",
    "three_figures": "three figures, nothing fitted",
}
"""Key of the JSON -> what it is."""
_KINDS = {"product": "compute", "memory": "fault", "call": "evict"}
"""Kind of an operator -> colour."""
_DOTS = 12.0


def show(result: Mapping[str, Any]) -> None:
    """Print all tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, heads, rows in _tables(result):
        table = Table(*heads, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(told_of_machine(result), highlight=False)


def told_of_machine(result: Mapping[str, Any]) -> str:
    """Return on what was measured, and whether it was disturbed."""
    machine = result["machine"]
    told = (
        f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, torch"
        f" {machine['torch']}; plain steps had a core for {result['core_share']:.0%} of their time"
    )
    if result["clock"] == "processor":
        return told + ", and the times are of the processor, as the thread had it"
    if not result["quiet"]:
        told += ": the machine was busy, and part of what no model told is what others did there"
    return told


def _tables(
    result: Mapping[str, Any],
) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    heads: tuple[str, ...] = ("", "median", "9 of 10", "bias")
    rows = []
    for key, label in REGIMES.items():
        found = result["residuals"][key]
        rows.append((f"steps, {label}", *_errors(found["steps"])))
        rows.append((f"operators, {label}", *_errors(found["operators"])))
    yield "relative error", heads, rows
    found = result["residuals"]["samples"]
    kinds = [
        (kind, f"{errors['seconds'] / found['operators']['seconds']:.0%}", *_errors(errors))
        for kind, errors in found["kinds"].items()
    ]
    heads = ("kind", "of the time", "median", "9 of 10", "bias")
    yield "operators of held-out samples, by kind", heads, kinds
    networks = [
        (
            row["network"],
            f"{row['operators']:.0f}",
            format_seconds(row["operators_s"]),
            f"{row['between']:+.0%}",
            f"{row['samples']['median']:.1%}",
            f"{row['networks']['median']:.1%}",
            f"{row['networks']['bias']:+.1%}",
        )
        for row in result["rows"]
    ]
    heads = (
        *("network", "operators", "they take", "plain step"),
        *("error, samples", "error, network", "bias, network"),
    )
    yield "median steps", heads, networks
    yield "models", ("", "fitted", "three figures"), list(_models(result))


def _models(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    models = result["model"], result["three_figures"]
    for dtype in models[0]["peak"]:
        peaks = (model["peak"].get(dtype) for model in models)
        yield (
            f"peak, {dtype}",
            *("" if peak is None else f"{peak / 1e9:.3g} GFLOP/s" for peak in peaks),
        )
    yield "half intensity", *(f"{model['half_intensity']:.3g} FLOP/B" for model in models)
    yield "bandwidth", *(f"{model['bandwidth'] / 1e9:.3g} GB/s" for model in models)
    for kind in models[0]["overhead"]:
        yield f"overhead, {kind}", *(f"{model['overhead'][kind] * 1e6:.2f} µs" for model in models)
    yield "operators with factors", *(str(len(model["operators"])) for model in models)


def _errors(errors: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{errors['median']:.1%}", f"{errors['p90']:.1%}", f"{errors['bias']:+.1%}"


# Figure -------------------------------------------------------------------------------------------


def draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    """Draw predicted against measured seconds, of steps and of operators."""
    left, right = figure.subplots(1, 2)
    steps = result["steps"]
    measured = [step[1] for step in steps]
    held, apart = ([step[column] for step in steps] for column in (2, 3))
    left.scatter(measured, held, _DOTS, color=color["plan"], label=REGIMES["samples"], zorder=3)
    left.scatter(
        measured,
        apart,
        _DOTS,
        facecolors="none",
        edgecolors=color["fault"],
        label=REGIMES["networks"],
        zorder=2,
    )
    _agree(left, color, measured, [*held, *apart], (1.0, 2.0, 5.0))
    left.set_title("steps", loc="left")
    rows = result["operators"]
    for kind, shade in _KINDS.items():
        own = [row for row in rows if row[2] == kind]
        right.scatter(
            [row[4] for row in own],
            [row[5] for row in own],
            _DOTS / 2,
            color=color[shade],
            label=kind,
            alpha=0.7,
            linewidths=0,
        )
    _agree(right, color, [row[4] for row in rows], [row[5] for row in rows], (1.0,))
    right.set_title("operators of held-out samples: all calls in one network", loc="left")


def _agree(
    axes: Axes,
    color: Mapping[str, str],
    measured: Sequence[float],
    predicted: Sequence[float],
    ticks: Sequence[float],
) -> None:
    """Draw where both are equal, and where one is twice the other; ``ticks`` in each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = min(*measured, *predicted) / 1.5, max(*measured, *predicted) * 1.5
    for factor, style in ((1.0, "-"), (2.0, ":"), (0.5, ":")):
        axes.plot(
            [low, high],
            [low * factor, high * factor],
            style,
            color=color["rss"],
            linewidth=0.8,
            zorder=1,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=ticks, numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds * 1e3:g}"))
    axes.minorticks_off()
    axes.set_xlabel("measured, ms")
    axes.set_ylabel("predicted, ms")
    axes.grid(visible=True, which="major", axis="both")
    axes.legend(frameon=False, loc="upper left")


# Page ---------------------------------------------------------------------------------------------


def page(result: Mapping[str, Any], name: str) -> str:
    """Return the page of the result as Markdown; ``name`` is that of JSON and figure."""
    tables = {title: _markdown(heads, rows) for title, heads, rows in _tables(result)}
    counts = result["fitted_steps"], result["held_steps"], len(result["rows"])
    clock = "" if result["clock"] == "wall" else f" --clock {result['clock']}"
    return f"""# Costs of operators

`dynoffload experiment costs{clock} --json docs/results/{name}.json` wrote this page.
Measured on {told_of_machine(result)}.

## What was asked

A trace holds for each operator what it took here. On other hardware it takes another time, which a
cost model tells from what the operator does: its FLOPs, its bytes, its dtype
(`dynoffload.profiler.costs`; the formula stands there). How far is such a model off where it can be
checked, on the machine that it was fitted to?

{counts[2]} networks, {counts[0]} steps to fit to, {counts[1]} held-out steps of other samples.
*Held-out samples*: the model is fitted to all networks. *Held-out networks*: for each network a
model is fitted to the others. *Three figures*: nothing is fitted; the peak is that of one large
product, the bandwidth that of one large addition, the overhead that of a smallest one, as from a
data sheet.

## Residual

|predicted / measured - 1|. A step counts once, an operator by its time. *Bias* is the sum of all
predicted over that of all measured times, less 1.

{tables["relative error"]}

{tables["operators of held-out samples, by kind"]}

![Predicted against measured seconds]({name}.svg)

*Dotted: twice and half of what was measured.*

## Networks

*They take*: the sum over operators, under the recorder, which a model predicts. *Plain step*: how
much longer (or shorter) the same step takes without a recorder: what the interpreter does between
operators, less the recorder's part in the time of small ones. A model does not tell this.

{tables["median steps"]}

## Parameters

{tables["models"]}

## Limits

- Seconds are those of operators one after the other. Where an accelerator computes beside the
  interpreter, a step takes the longer of both, not their sum.
- An operator without a formula for its FLOPs counts as bound by its bytes
  (`dynoffload.profiler.flops` says which have one). In a fit its factor makes up for that; with a
  data sheet nothing does.
- Factors are of the machine that they were fitted to. A model that is written from a data sheet has
  none, so *three figures* says more of it than the first two rows do.
- Bytes are those of an operator's arguments and results, from wherever they come: what still lies
  in a cache is as slow as what does not.
"""


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
