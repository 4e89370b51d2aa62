"""The tables, the figure and the page of `dynoffload.experiments.gpu`.

What it is: its numbers as people read them. What it is not: their measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.gpu_rows import MEASURED
from dynoffload.experiments.gpu_verdicts import link_share, overlap, plain_of
from dynoffload.experiments.gpu_ways import PLAIN, WAYS
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TIMES = (
    *("cap", "way", "step", "times plain", "GB in", "out", "link used", "overlap"),
    *("stalled", "allocator's peak", "losses equal"),
)
_SIZES = ("way", "layers", "parameters", "times plain", "step", "pinned", "charged", "beyond that")
_SHADES = {
    "plain": ("ink", "o"),
    "ours": ("plan", "o"),
    "ours-file": ("compute", "s"),
    "save-on-cpu": ("fault", "v"),
    "checkpoint": ("backward", "^"),
    "fsdp2": ("evict", "D"),
    "dtr": ("stall", "P"),
    "zero-offload": ("optimizer", "X"),
}
"""Way -> colour and mark."""
_WIDTH = 150
_SAID = 160
Row = Mapping[str, Any]
Table = tuple[str, Sequence[str], list[list[str]]]  # title, heads, rows


def show(result: Mapping[str, Any]) -> None:
    """Print the tables and the verdicts."""
    from rich import table as rich
    from rich.console import Console

    console = Console(width=max(Console().width, _WIDTH))
    for title, heads, rows in tables(result):
        table = rich.Table(title=title, title_justify="left", box=None)
        for number, head in enumerate(heads):
            table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    for line in (*reasons(result), *map(told, result.get("verdicts", ()))):
        console.print(line, highlight=False, markup=False)


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables for which there are rows."""
    if result["link"] is not None:
        yield _link(result["link"])
    for network in _names(result, "steps", "network"):
        rows = [row for row in _rows(result, "steps") if row["network"] == network]
        yield f"{network}: time per step", _TIMES, [_timed(result, row) for row in rows]
    for tokens in _names(result, "tokens", "tokens"):
        rows = [row for row in _rows(result, "tokens") if row["tokens"] == tokens]
        title = f"{rows[0]['network']}, {tokens} tokens: time per step"
        yield title, _TIMES, [_timed(result, row) for row in rows]
    if _rows(result, "capacity"):
        cap = format_bytes(result["cap_bytes"])
        yield f"the largest network under {cap}", _SIZES, list(_sizes(result))


def _rows(result: Mapping[str, Any], part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def _names(result: Mapping[str, Any], part: str, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in _rows(result, part)))


def _link(link: Row) -> Table:
    said = {
        "to the accelerator": "in_bps",
        "from it": "out_bps",
        "to it, both at once": "both_in_bps",
        "from it, both at once": "both_out_bps",
        "to it, memory not pinned": "pageable_in_bps",
        "from it, memory not pinned": "pageable_out_bps",
        "pinning memory": "pin_bps",
        "the file, read": "file_read_bps",
        "the file, written": "file_write_bps",
        "the file, both at once": "file_mixed_bps",
    }
    rows = [[what, f"{link[key] / 1e9:.2f} GB/s"] for what, key in said.items()]
    pinned = "pinned" if link["pinned"] else "NOT pinned"
    return f"the link, by copies of {format_bytes(link['chunk_bytes'])}, {pinned}", ("", ""), rows


def _timed(result: Mapping[str, Any], row: Row) -> list[str]:
    cap = f"{row['share']} ({format_bytes(row['cap_bytes'])})"
    title = WAYS[row["way"]].title
    if row["state"] != MEASURED:
        return [cap, title, row["state"], *[""] * (len(_TIMES) - 3)]
    plain = plain_of(result, row)
    over = (
        None if plain is None or plain["state"] != MEASURED else row["seconds"] / plain["seconds"]
    )
    share, beside = link_share(row, result["link"]), overlap(row, plain, result["link"])
    moved = [row.get("bytes_in"), row.get("bytes_out")]
    peak = row.get("peak_allocated")
    return [
        cap,
        title,
        format_seconds(row["seconds"]),
        "" if over is None else f"{over:.2f}",
        *("" if one is None else f"{one / 1e9:.2f}" for one in moved),
        "" if share is None else f"{share:.0%}",
        "" if beside is None else f"{beside:.2f}",
        "" if row.get("stall_s") is None else format_seconds(row["stall_s"]),
        format_bytes(peak) if peak else "",
        {True: "yes", False: "NO" if WAYS[row["way"]].exact else "no", None: ""}[
            row["losses_equal"]
        ],
    ]


def _sizes(result: Mapping[str, Any]) -> Iterator[list[str]]:
    rows = _rows(result, "capacity")
    most = {way: _largest(rows, way) for way in _names(result, "capacity", "way")}
    plain = most.get(PLAIN)
    for way, best in most.items():
        beyond = [row for row in rows if row["way"] == way and row["state"] != MEASURED]
        beyond = [row for row in beyond if best is None or row["layers"] > best["layers"]]
        first = min(beyond, key=lambda row: row["layers"], default=None)
        ends = "nothing was tried" if first is None else f"{first['layers']}: {first['state']}"
        if best is None:
            yield [WAYS[way].title, "none", *[""] * (len(_SIZES) - 3), ends]
            continue
        over = "" if plain is None else f"{best['parameters'] / plain['parameters']:.1f}"
        yield [
            WAYS[way].title,
            str(best["layers"]),
            f"{best['parameters'] / 1e6:.0f} million",
            over,
            format_seconds(best["seconds"]),
            *(
                "" if best.get(key) is None else format_bytes(best[key])
                for key in ("pinned_bytes", "charged_bytes")
            ),
            ends,
        ]


def _largest(rows: Sequence[Row], way: str) -> Row | None:
    fits = [row for row in rows if row["way"] == way and row["state"] == MEASURED]
    return max(fits, key=lambda row: row["layers"], default=None)


def told(verdict: Row) -> str:
    """Return a verdict as a line."""
    found = verdict["found"]
    number = "" if found is None else f", found {found:.3g}"
    where = f" ({verdict['where']})" if verdict["where"] else ""
    return f"{verdict['state']}: {verdict['what']}: {verdict['target']}{number}{where}"


def reasons(result: Mapping[str, Any]) -> list[str]:
    """Return why rows that are not measured are not."""
    lines = []
    for row in result["rows"]:
        if row["state"] == MEASURED:
            continue
        if row["part"] == "link":
            lines.append(f"the link: {row['state']}: {row['why'][:_SAID]}")
            continue
        where = f"{row['layers']} layers" if "layers" in row else row["share"]
        who = f"{row['network']}, {where}: {WAYS[row['way']].title}"
        lines.append(f"{who}: {row['state']}: {row['why'][:_SAID]}")
    return lines


# Figure


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """Draw time over plain training's by cap, a panel a network, and the largest networks."""
    from dynoffload.reporting.canvas import write_figure as write

    path.parent.mkdir(parents=True, exist_ok=True)
    write(lambda figure, color: _draw(figure, color, result), path, height=4.2)


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
    networks = _names(result, "steps", "network")
    sized = bool(_rows(result, "capacity"))
    panels = [*networks, *(["capacity"] if sized else [])]
    if not panels:
        figure.text(0.5, 0.5, "no rows were measured", ha="center", color=color["muted"])
        return
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, network in zip(every, networks, strict=False):
        rows = [row for row in _rows(result, "steps") if row["network"] == network]
        _lines(axes, color, result, rows)
        axes.set_title(network, loc="left")
    if networks:
        every[0].set_ylabel("step, times plain in memory")
    if sized:
        _bars(every[-1], color, _rows(result, "capacity"))
        every[-1].set_title(f"parameters under {format_bytes(result['cap_bytes'])}", loc="left")
    figure.legend(
        handles=_handles(color, result), loc="outside upper center", ncols=4, frameon=False
    )


def _lines(
    axes: Axes, color: Mapping[str, str], result: Mapping[str, Any], rows: Sequence[Row]
) -> None:
    shares: dict[str, float] = {row["share"]: float(Fraction(row["share"])) for row in rows}
    for way, (shade, mark) in _SHADES.items():
        points = []
        for row in rows:
            plain = plain_of(result, row)
            if row["way"] == way and row["state"] == MEASURED and plain is not None:
                points.append((shares[row["share"]], row["seconds"] / plain["seconds"]))
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, "-", marker=mark, markersize=5, color=color[shade], linewidth=1.4)
    axes.axhline(1.0, color=color["muted"], linewidth=0.8, linestyle=":")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(shares.values()), list(shares))
    axes.set_xlim(1.3 * max(shares.values()), min(shares.values()) / 1.3)
    axes.minorticks_off()
    axes.set_xlabel("cap, of what plain training takes")


def _bars(axes: Axes, color: Mapping[str, str], rows: Sequence[Row]) -> None:
    ways = [way for way in _SHADES if any(row["way"] == way for row in rows)]
    best = [_largest(rows, way) for way in ways]
    sizes = [0.0 if row is None else row["parameters"] / 1e6 for row in best]
    axes.barh(range(len(ways)), sizes, 0.62, color=[color[_SHADES[way][0]] for way in ways])
    for place, size in enumerate(sizes):
        axes.annotate(
            f"{size:.0f}" if size else "none",
            (size, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(ways)), [WAYS[way].title for way in ways], fontsize=6.5)
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * max([*sizes, 1.0]))
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.set_xlabel("million parameters")


def _handles(color: Mapping[str, str], result: Mapping[str, Any]) -> list[Any]:
    from matplotlib.lines import Line2D

    shown = {row.get("way") for row in result["rows"]}
    return [
        Line2D([], [], color=color[shade], marker=mark, markersize=5, label=WAYS[way].title)
        for way, (shade, mark) in _SHADES.items()
        if way in shown
    ]


# Page


def page_of(result: Mapping[str, Any], figure: str) -> str:
    """Return the page as Markdown; ``figure`` is where the figure lies, seen from it."""
    found = []
    for title, heads, rows in tables(result):
        lines = [heads, ["---", "---", *["---:"] * (len(heads) - 2)], *rows]
        found.append(f"### {title}\n\n" + "\n".join(f"| {' | '.join(one)} |" for one in lines))
    about = result["environment"]
    why = "\n".join(f"- {line}" for line in reasons(result)) or "All rows were measured."
    verdicts = "\n".join(f"- {told(one)}" for one in result.get("verdicts", ()))
    same = "that give the same bits again" if result["deterministic"] else "of torch's choice"
    return f"""# Training on an accelerator under a cap, against what users would take

    dynoffload experiment gpu --preset {result["preset"]} --steps {result["steps"]} \
--warmup {result["warmup"]} --json PATH --page PATH.md

wrote this page on {about["name"]}, torch {about["torch"]}, Python {about["python"]}.

## What is compared

Every row is a process of its own, whose allocator may take no more than the cap, cached blocks
included. A cap of 1 is what plain training took at most; the others are shares of that. All ways
train the same network on the same samples with fused AdamW, by algorithms {same}.
A time is the median of {result["steps"]} steps after {result["warmup"]} others, each until the
queue on which torch computes has come to its end.

## What was to be reached

{verdicts}

![Time over caps, and the largest networks]({figure})

*Time of a step over that of plain training in memory, by cap; the largest networks under one cap.*

## All rows

{(chr(10) * 2).join(found)}

## What was not measured, and why

{why}

## How to read it

- *Link used* is what the bytes of a step take at the bandwidth measured with both directions at
  once, in the busier direction, over the step. *Overlap* is what that and plain training's step
  take together more than the step, of the lesser of them: 1 is all hidden, 0 nothing.
- Ways that update on the CPU (FSDP2, ZeRO-Offload) cannot have the losses of an update on the
  accelerator; theirs are compared all the same.
- Rematerialisation drops activations alone, and judges operators by how long they take to launch.
- Networks of the part on capacity that this library trains are built on the meta device; their
  weights are other draws than plain training's, and their losses are not compared.
"""
