"""Training on an accelerator under a cap of its memory: capacity, time and overlap against peers.

The link and the file as measured here; time per step at caps from all that plain training takes
down to a sixteenth of it, for the MoE language model and the Evoformer trunk; long batches, where
computing is what takes time; and the largest network under one cap, plainly and by each way. Every
row is a process of its own whose allocator is capped alike. It has never run on a GPU so far: what
it does was tested over an emulated one, and no number of it is published.

[Note: caps]  A cap is what `set_per_process_memory_fraction` lets the allocator take, cached
blocks included; ``1`` is what plain training took at most. What is below is never plain. Ways that
count bytes get a budget of `HEADROOM` of the cap, the first with which they run: what the allocator
keeps in pieces is not theirs. Managed memory is never asked for.

[Note: bound]  Copies take bytes over bandwidth, in the direction that takes longer, by the rates
measured with both directions at once. A step can take no less than the larger of that and of plain
training's step in memory. Overlap is what both together take more than the step, of the lesser of
them: 1 if that is hidden wholly, 0 if nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.experiments.baselines import DTR
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.gpu_check import about, accelerator
from dynoffload.experiments.gpu_check_cases import environment
from dynoffload.experiments.gpu_link import Link, measure_link
from dynoffload.experiments.gpu_rows import MEASURED, NO_ROOM, NOT_MEASURED, measure
from dynoffload.experiments.gpu_verdicts import judge, link_share, overlap, plain_of
from dynoffload.experiments.gpu_ways import FILES, OURS, PLAIN, WAYS, Task
from dynoffload.experiments.harness import Experiment, Row, option
from dynoffload.experiments.processes import WorkerError, fresh
from dynoffload.memory.spill import default_spill_dir
from dynoffload.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINK, STEPS, TOKENS, CAPACITY = "link", "steps", "tokens", "capacity"
PARTS = (LINK, STEPS, TOKENS, CAPACITY)
BUDGETS = ("1", "1/2", "1/4", "1/8", "1/16")
HEADROOM = (0.9, 0.75, 0.5)
"""Shares of a cap that ways which count bytes are given, one after the other until one runs."""
_LEAST_STEPS = 5
_FILE_AT = Fraction(1, 8)  # the cap at which the way with a file below is measured
_FOLDS = {"rows": 1, "min_length": 64, "max_length": 96, "min_depth": 16, "max_depth": 32}


Train = Callable[[Task], Row]
"""Has a task measured in a process of its own."""


@dataclass(frozen=True)
class Scale:
    """What is trained.

    Attributes:
        networks: by name, of the part with many caps.
        long: of the part with long batches; their tokens are an option.
        unit: one layer more or less makes the networks of the part on capacity.
    """

    networks: Mapping[str, Task]
    long: Task
    unit: Task


def _scale(preset: str, layer: Mapping[str, int], moe: Mapping[str, int]) -> Scale:
    return Scale(
        {
            "moe": Task("", "moe", preset, shape={"rows": 1, **moe}),
            "evoformer": Task("", "evoformer", preset, shape={**_FOLDS, "max_cycles": 3}),
        },
        Task("", "moe", preset),
        Task("", "moe", "tiny", sizes=dict(layer), shape={"rows": 1, **moe}, meta=True),
    )


SCALES: dict[str, Scale] = {
    "tiny": _scale("tiny", {"hidden": 64, "experts": 4, "width": 80}, {"length": 16}),
    "base": _scale(
        "base", {"hidden": 512, "heads": 8, "experts": 8, "width": 1024}, {"length": 1024}
    ),
}
"""By the name that ``--preset`` takes."""


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
_SAID = 160


@dataclass(frozen=True)
class Params:
    """What is measured."""

    parts: tuple[str, ...] = option(PARTS, "of the measurement")
    preset: str = option("base", "of all networks: tiny or base")
    networks: tuple[str, ...] = option(("moe", "evoformer"), "of the part with many caps")
    budgets: tuple[str, ...] = option(BUDGETS, "shares of what plain training takes, as 1/4")
    ways: tuple[str, ...] = option(tuple(WAYS), "of training")
    steps: int = option(6, f"of each row that count, at least {_LEAST_STEPS}")
    warmup: int = option(3, "steps before them")
    tokens: tuple[int, ...] = option((1024, 8192, 32768), "of the part with long batches")
    cap: str = option("2GiB", "of the accelerator's memory in the part on capacity")
    host: str = option("8GiB", "host memory there of the way with a file below it")
    most: int = option(16, "times the layers of plain training that are tried at the most")
    deterministic: bool = option(True, "algorithms that give the same bits again, for all ways")
    patience: float = option(240.0, "seconds that one row may take")
    spill_dir: Path | None = option(None, "where files lie", place=True)

    def __post_init__(self) -> None:
        if self.preset not in SCALES:
            raise ConfigError(f"no preset {self.preset!r}; there are {', '.join(SCALES)}")
        known = {
            "parts": PARTS,
            "networks": tuple(SCALES[self.preset].networks),
            "ways": tuple(WAYS),
        }
        for name, names in known.items():
            asked = getattr(self, name)
            unknown = [one for one in asked if one not in names]
            if unknown or not asked:
                named = ", ".join(map(repr, unknown)) or "nothing"
                raise ConfigError(f"{name} names {named}; there are {', '.join(names)}")
        if PLAIN not in self.ways:
            raise ConfigError(f"ways lacks {PLAIN}, by which all others are told: add it")
        for name, least in (("steps", _LEAST_STEPS), ("warmup", 1), ("most", 1)):
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise ConfigError(f"{name}={value} is too few: take at least {least}")
        shares_of(self.budgets)


class Gpu(Experiment[Params]):
    """A case is the link, a network under all caps, a batch, or the search for the largest."""

    parameters = Params
    height = 4.2

    def cases(self) -> Mapping[str, tuple[str, Any]]:
        params, parts = self.params, self.params.parts
        accelerator()
        return {
            **({LINK: (LINK, None)} if LINK in parts else {}),
            **{f"{STEPS} {name}": (STEPS, name) for name in params.networks if STEPS in parts},
            **{f"{TOKENS} {count}": (TOKENS, count) for count in params.tokens if TOKENS in parts},
            **({CAPACITY: (CAPACITY, None)} if CAPACITY in parts else {}),
        }

    def run(self, case: tuple[str, Any]) -> Row:
        params, (part, what) = self.params, case
        scale, spill = SCALES[params.preset], str(params.spill_dir or default_spill_dir())
        common: dict[str, Any] = {
            "device": str(accelerator()),
            "steps": params.steps,
            "warmup": params.warmup,
            "deterministic": params.deterministic,
            "spill_dir": spill,
        }
        rows: Iterable[Row]
        if part == LINK:
            rows = [self._link(Link(common["device"], spill))]
        elif part == STEPS:
            task = replace(scale.networks[what], **common)
            rows = at_caps(task, shares_of(params.budgets), params.ways, self.train)
        elif part == TOKENS:
            task = replace(scale.long, shape={"rows": 1, "length": what}, **common)
            shares = [Fraction(1), Fraction(1, 8)]
            found = at_caps(task, shares, (PLAIN, OURS), self.train)
            rows = ({"tokens": what, **row} for row in found)
        else:
            brief = {**common, "warmup": 1, "steps": 2, "cap_bytes": parse_bytes(params.cap)}
            host = parse_bytes(params.host)
            rows = largest(replace(scale.unit, **brief), params.ways, params.most, host, self.train)
        return {"rows": [{"part": part, **row} for row in rows]}

    def train(self, task: Task) -> Row:
        """Return a task's row: ``task``, ``state``, ``why`` and its numbers."""
        what = f"{WAYS[task.way].title}, {task.network}"
        if task.cap_bytes:
            what += f" under {format_bytes(task.cap_bytes)}"
        return {"task": asdict(task), **self._ask(what, measure, task)}

    def _link(self, link: Link) -> Row:
        found = self._ask("the link", measure_link, link)
        return {"task": asdict(link), "state": MEASURED, "why": "", **found}

    def _ask(self, what: str, function: Callable[[Any], Row], task: Any) -> Row:
        self.report(what)
        limits: dict[str, Any] = {"patience": self.params.patience, "environment": environment()}
        try:
            return fresh(what, function, task, **limits)
        except WorkerError as error:
            return {"state": NOT_MEASURED, "why": str(error)}

    def settled(self, row: Row) -> bool:
        return all(one["state"] != NOT_MEASURED for one in row["rows"])

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"environment": about(accelerator()), "verdicts": judge(_flat({"rows": rows}))}

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        flat = _flat(result)
        verdicts = [told(one) for one in result["summary"]["verdicts"]]
        return [*tables(flat, self.params.cap), *reasons(flat), *verdicts]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        _draw(figure, color, _flat(result), self.params.cap)


def _flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of all cases, and the link's."""
    rows = [row for case in result["rows"] for row in case["rows"]]
    links = (row for row in rows if row["part"] == LINK and row["state"] == MEASURED)
    return {"rows": rows, "link": next(links, None)}


def shares_of(texts: Sequence[str]) -> list[Fraction]:
    """Return shares as numbers, the largest first; ``1`` is always one of them.

    Raises:
        ConfigError: a text is no share above 0 and at most 1.
    """
    found = {Fraction(1)}
    for text in texts:
        try:
            share = Fraction(text)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not 0 < share <= 1:
            raise ConfigError(
                f"{text!r} in budgets is no share above 0 and at most 1: write 1/4, or 0.25"
            )
        found.add(share)
    return sorted(found, reverse=True)


# Rows


def at_caps(
    task: Task, shares: Sequence[Fraction], ways: Sequence[str], train: Train
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one network: plain training first, without a cap, which says what all the
    caps are shares of; then every way under every cap, until one has no room.

    Args:
        task: the network, without a way or a cap.
        shares: of what plain training takes, the largest first.
        ways: keys of `WAYS`.
        train: has one measured.
    """
    plain = train(replace(task, way=PLAIN))
    whole = 0 if plain["state"] != MEASURED else plain["peak_reserved"] or 16 * plain["parameters"]
    about = {"network": task.network}
    yield {**about, "way": PLAIN, "share": "1", "cap_bytes": whole, "losses_equal": None, **plain}
    if not whole:
        return
    ended: dict[str, str] = {PLAIN: "1"}
    for share in shares:
        for way in ways:
            if way == PLAIN or (way == FILES and share != _FILE_AT):
                continue
            row = {**about, "way": way, "share": str(share), "cap_bytes": int(share * whole)}
            one = replace(task, way=way, cap_bytes=int(share * whole))
            if way in ended:
                why = f"it has no room under {ended[way]}"
                found = {"task": asdict(one), "state": NO_ROOM, "why": why}
            else:
                found = _within(one, plain["parameters"], train)
                if found["state"] == NO_ROOM:
                    ended[way] = str(share)
            yield {**row, "losses_equal": _equal(found, plain), **found}


def _within(task: Task, parameters: int, train: Train) -> dict[str, Any]:
    """Return the row of a task under its cap, with the first budget of [Note: caps] that runs."""
    if task.way == FILES and not task.host_bytes:
        task = replace(task, host_bytes=4 * parameters)  # a quarter of what AdamW makes it take
    if not WAYS[task.way].counts:
        return train(task)
    found: dict[str, Any] = {}
    for share in HEADROOM:
        found = train(replace(task, budget_bytes=int(share * task.cap_bytes)))
        found["budget_share"] = share
        if found["state"] != NO_ROOM:
            break
    return found


def _equal(found: Mapping[str, Any], plain: Mapping[str, Any]) -> bool | None:
    """Return whether the losses are plain training's, bit by bit; None where there are none."""
    if found["state"] != MEASURED or plain["state"] != MEASURED:
        return None
    return bool(found["losses"] == plain["losses"])


def largest(
    unit: Task, ways: Sequence[str], most: int, host: int, train: Train
) -> Iterator[dict[str, Any]]:
    """Yield a row for each size of each way that was tried under the cap of ``unit``.

    Plain training's size is found to a layer. The others are tried at halves of ``most`` times
    that, from half of it on: up while they fit, down until they do.

    Args:
        unit: the network of one layer, without a way.
        ways: keys of `WAYS`.
        most: times the layers of plain training that are tried at the most.
        host: bytes of host memory of the way with a file.
        train: has one measured.
    """
    rows: list[dict[str, Any]] = []

    def fits(way: str, layers: int) -> bool:
        sizes = {**unit.sizes, "layers": layers}
        counts = WAYS[way].counts
        task = replace(unit, way=way, sizes=sizes, host_bytes=host if way == FILES else 0)
        task = replace(task, meta=unit.meta and counts and way != DTR)
        found = _within(task, 0, train)
        rows.append({"way": way, "network": unit.network, "layers": layers, **found})
        return bool(found["state"] == MEASURED)

    low, high = 0, 1
    while fits(PLAIN, high):
        low, high = high, 2 * high
    while high - low > 1 and low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(PLAIN, middle) else (low, middle)
    yield from rows
    for way in ways:
        if way == PLAIN or not low:
            continue
        rows.clear()
        times = max(1, most // 2)
        if fits(way, times * low):
            if times < most:
                fits(way, most * low)
        else:
            while times > 1 and rows[-1]["state"] == NO_ROOM:
                times //= 2
                fits(way, times * low)
        yield from rows


# Tables and figure


def tables(result: Mapping[str, Any], cap: str) -> Iterator[Table]:
    """Yield the tables for which there are rows."""
    if result["link"] is not None:
        yield _link(result["link"])
    for part, key, unit in ((STEPS, "network", ""), (TOKENS, "tokens", " tokens")):
        for name in _names(result, part, key):
            rows = [row for row in _rows(result, part) if row[key] == name]
            cells = [_timed(result, row) for row in rows]
            yield Table(f"{name}{unit}: time per step", _TIMES, cells, (0, 1))
    if _rows(result, CAPACITY):
        yield Table(f"the largest network under {cap}", _SIZES, list(_sizes(result)))


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
    title = f"the link, by copies of {format_bytes(link['chunk_bytes'])}, {pinned}"
    return Table(title, ("", ""), rows)


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


def _draw(figure: Figure, color: Mapping[str, str], result: Mapping[str, Any], cap: str) -> None:
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
        every[-1].set_title(f"parameters under {cap}", loc="left")
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
