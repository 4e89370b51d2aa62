"""Where the time of a step under a budget goes: operators, our own work, waits, and the disk's.

Each network trains plainly, plainly again, plainly beside a process that moves the same bytes at
the same rate (the *interference floor*), under a budget with default options, and with the
optimizer in backward. The ways take turns on the same samples. Parts of the session's own work are
timed one by one.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from dynoffload.config import OffloadConfig
from dynoffload.doctor import measure_tiers
from dynoffload.errors import BudgetError
from dynoffload.experiments import step_time, traffic
from dynoffload.experiments.ablation_sessions import networks
from dynoffload.experiments.clock import EVENTS, KINDS, PARTS
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import Contestant, Way, median_seconds
from dynoffload.experiments.harness import Cell, Experiment, Row, check_known, option, table
from dynoffload.experiments.pilot_recording import learned
from dynoffload.experiments.processes import Process
from dynoffload.experiments.ways import BUDGETED, Spec, adamw, network, samples
from dynoffload.experiments.zoo import TRUNK
from dynoffload.memory.spill import default_spill_dir
from dynoffload.pilot.progress import Report
from dynoffload.runtime.sizing import sizing_of
from dynoffload.simulation.machine import Link
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

_TIER_SECONDS = 0.5
_PER_TURN = 2  # steps of a turn that count
_REACHED = 0.9  # of the traffic that is asked for; less is remarked on
_RECORDED = 16  # steps from which a footprint is taken
_BASE_BUDGET = 1e9
TIED = Spec(
    "moe",
    "small",
    sizes={"vocabulary": 50_257, "tied": True, "hidden": 256, "heads": 4, "width": 512},
    shape={"rows": 2, "length": 16},
    threads=1,
)
WAYS: dict[str, dict[str, Any]] = {
    "budget": {},
    "in_backward": {"optimizer_in_backward": True},
}
"""Ways under the budget -> their options."""
_SHADES = ("forward", "backward", "optimizer", "fault", "evict", "plan", "budget")
"""Colours of the parts."""


@dataclass(frozen=True)
class Case:
    """One network under one budget: a share of its footprint, bytes, or 0 for the least that is
    accepted. The first steps, ``warmup`` of them, do not count. All processes begin anew as many
    ``times``, as memory that lies elsewhere changes a step's time by some percent; the middle
    one of these counts."""

    spec: Spec
    budget: float
    warmup: int = 14
    times: int = 1


def cases() -> dict[str, Case]:
    """Return the cases by name: dynamic networks at an eighth or the least share that runs, a small
    mixture at all and at twice its footprint, one whose tied embedding is the largest parameter at
    the least budget, and a mixture of 328 million parameters at 1 GB. All but the last compute with
    one thread."""
    found = {
        case.title: Case(
            Spec(case.network, case.preset, shape=case.shape, lr=case.lr, threads=1), share
        )
        for case, share in networks("small").values()
    }
    mixture, trunk = (replace(step_time.PRESETS["small"][n], threads=1) for n in ("moe", TRUNK))
    return {
        **found,
        "Evoformer": Case(trunk, 0.125),
        "small mixture": Case(mixture, 0.125),
        "small mixture, all": Case(mixture, 1.0, times=5),
        "small mixture, twice": Case(mixture, 2.0, times=5),
        "tied embedding, least": Case(TIED, 0, 4),
        "base mixture, 512 tokens": Case(_base(rows=2), _BASE_BUDGET, 4),
        "base mixture, 1,024 tokens": Case(_base(rows=4), _BASE_BUDGET, 4),
    }


def _base(rows: int) -> Spec:
    return Spec("moe", "base", shape={"rows": rows, "length": 256})


def budget_of(case: Case, report: Report) -> tuple[int, int | None]:
    """Return the budget of a case in bytes, and the footprint if the budget is a share of it."""
    if not case.budget:
        return _least(case.spec), None
    if case.budget >= _BASE_BUDGET:
        return int(case.budget), None
    with tempfile.TemporaryDirectory() as folder:
        footprint, _ = learned(case.spec, _RECORDED, report, Path(folder) / "unused.pilot")
    return int(case.budget * footprint), footprint


def _least(spec: Spec) -> int:
    """Return the least budget that is accepted."""
    model = network(spec)
    optimizer, options = adamw(model, spec), OffloadConfig()
    budget = 1
    while True:
        try:
            sizing_of(model, optimizer, budget, options)
        except BudgetError as error:
            if not error.lacking:
                raise
            budget += error.lacking
        else:
            return budget


def of_saved(spec: Spec) -> float:
    """Return the share of masks and integers in the bytes that autograd saves of one sample."""
    model, sample = network(spec), next(samples(replace(spec, split="held-out")))
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, sizes = [], {True: 0, False: 0}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept.append(storage)  # or its address would return
            sizes[tensor.is_floating_point()] += storage.nbytes()
        return tensor

    from torch.autograd.graph import saved_tensors_hooks

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        sample.call(model)
    return sizes[False] / sum(sizes.values())


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    only: tuple[str, ...] = option(
        (), "cases, by name, in double quotes where it has a comma; all by default"
    )
    steps: int = option(8, "of each way that count, two a turn")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)


class Overhead(Experiment[Params]):
    """A case is a network under a budget."""

    parameters = Params
    title = "a step, and what it takes"
    height = 5.6

    def cases(self) -> Mapping[str, Case]:
        known = cases()
        check_known("only", self.params.only, known)
        return {name: known[name] for name in self.params.only or known}

    def run(self, case: Case) -> Row:
        budget, footprint = budget_of(case, self.report)
        rows = [self._row(case, budget, footprint) for _ in range(case.times)]
        return sorted(rows, key=_over_plain)[len(rows) // 2]

    def _row(self, case: Case, budget: int, footprint: int | None) -> Row:
        own, directory = self.params, self.params.spill_dir or default_spill_dir()
        plain = replace(case.spec, split="held-out", timed=True, spill_dir=str(directory))
        tiers = measure_tiers(directory, _TIER_SECONDS)
        with ExitStack() as stack:
            sides = {
                **{
                    name: Contestant(name, Way(plain), required=True)
                    for name in ("plain", "plain again")
                },
                **{
                    name: Contestant(
                        name,
                        Way(
                            replace(
                                plain, mode=BUDGETED, budget=budget, config=config, pilot="auto"
                            )
                        ),
                    )
                    for name, config in WAYS.items()
                },
            }
            for side in sides.values():
                side.start(stack)
            beside = stack.enter_context(Process("traffic"))
            over_floor: dict[str, list[float]] = {name: [] for name in WAYS}
            self._rates: list[float] = []  # of the traffic, as shares of what is asked
            for _ in range(case.warmup):
                for name, side in sides.items():
                    side.step(measured=False)
                    self.report(name)
            for number in range(-(-own.steps // _PER_TURN)):
                for name in list(sides) if number % 2 == 0 else reversed(sides):
                    self._turn(sides[name], measured=True)
                if not sides["budget"].why:
                    for name, ratios in self._over_floor(sides, beside, str(directory)).items():
                        over_floor[name] += ratios
            operators = {
                name: side.step(measured=False, do="operators").get("operators_s")
                for name, side in sides.items()
            }
            link = Link(tiers.read_bps, tiers.write_bps, tiers.mixed_bps)
            found = {
                name: {
                    **_summary(sides[name], sides["plain"], link, operators[name]),
                    "over_floor": median(ratios) if (ratios := over_floor[name]) else None,
                }
                for name in WAYS
            }
        return {
            "budget_bytes": budget,
            "footprint_bytes": footprint,
            "largest_bytes": max(
                p.nbytes for p in network(replace(case.spec, meta=True)).parameters()
            ),
            "plain_s": median_seconds(sides["plain"].steps),
            "integers": of_saved(case.spec),
            "plain_again": _times(sides["plain again"], sides["plain"]),
            "plain_operators_s": operators["plain"],
            "floor_rate": median(self._rates) if self._rates else None,
            "link": {"read_bps": link.read_bps, "write_bps": link.write_bps},
            "ways": found,
        }

    def _turn(self, side: Contestant, *, measured: bool) -> None:
        """Make a step that absorbs what was transferred during others' turns, then those that
        count."""
        for place in range(1 + _PER_TURN):
            side.step(measured=measured and place > 0)
            self.report(side.name)

    def _over_floor(
        self, sides: Mapping[str, Contestant], beside: Process, directory: str
    ) -> dict[str, list[float]]:
        """Make plain steps while another process moves what the budgeted steps move; return the
        times of each way on the same samples in these. Nothing if nothing moves."""
        steps, plain = sides["budget"].steps[-_PER_TURN:], sides["plain"]
        seconds = sum(step.seconds for step in steps)
        rates = [sum(s.stats[key] for s in steps) / seconds for key in ("bytes_in", "bytes_out")]
        if not any(rates):
            return {}
        beside.call(traffic.begin, directory, *rates)
        begin = time.perf_counter()
        self._turn(plain, measured=False)
        moved = beside.call(traffic.end)
        self._rates.append(moved / (time.perf_counter() - begin) / sum(rates))
        found = {}
        for name, side in sides.items():
            if side is plain or side.why:
                continue
            self._turn(side, measured=False)
            pairs = zip(side.every[-_PER_TURN:], plain.every[-_PER_TURN:], strict=True)
            if name in WAYS:
                found[name] = [ours.seconds / theirs.seconds for ours, theirs in pairs]
        return found

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        lines = [
            {**row, "way": name, **row["ways"][name]}
            for row in result["rows"]
            for name in WAYS
            if row["ways"][name]["seconds"]
        ]
        return [
            table("a step", _STEPS, lines, ["way"]),
            table("time of a step in our own work, ms", _PARTS, lines, ["way"]),
            table("megabytes moved in a step, by kind", _KINDS, lines, ["way"]),
            *(
                f"{row['case']}: the process beside plain steps reached {row['floor_rate']:.0%} of "
                "the bytes a second of the budgeted steps"
                for row in result["rows"]
                if row["floor_rate"] is not None and row["floor_rate"] < _REACHED
            ),
            *(
                f"{row['case']}, {name}: {said}"
                for row in result["rows"]
                for name in WAYS
                if (said := row["ways"][name]["why"] or row["ways"][name]["note"])
            ),
        ]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        rows = [row for row in result["rows"] if row["ways"]["budget"]["seconds"]]
        axes, names = figure.subplots(), [row["case"] for row in rows]
        left = [0.0] * len(rows)
        for part, shade in zip(PARTS, _SHADES, strict=True):
            widths = [row["ways"]["budget"]["parts_s"][part] / row["plain_s"] for row in rows]
            axes.barh(names, widths, left=left, label=part, color=color[shade])
            left = [before + width for before, width in zip(left, widths, strict=True)]
        axes.axvline(1.0, color=color["rss"], label="plain PyTorch")
        for name, mark in zip(WAYS, ("|", "x"), strict=True):
            known = [row["ways"][name].get("over_plain", math.nan) for row in rows]
            title = f"the whole step{'' if name == 'budget' else ', optimizer in backward'}"
            axes.plot(known, names, mark, color=color["ink"], ms=11, label=title)
        axes.invert_yaxis()
        axes.set_xlabel("time, in steps of plain PyTorch")
        figure.legend(loc="outside upper center", ncols=4, frameon=False)


def _over_plain(row: Row) -> float:
    """Return the time under a budget over plain's, as a key: infinite for none."""
    return float(row["ways"]["budget"].get("over_plain", math.inf))


def _times(side: Contestant, plain: Contestant) -> float:
    """Return the median of a side's times over plain ones of the same samples."""
    pairs = zip(side.steps, plain.steps, strict=True)
    return median(ours.seconds / theirs.seconds for ours, theirs in pairs)


def _summary(side: Contestant, plain: Contestant, link: Link, operators_s: float | None) -> Row:
    result = side.result(plain.losses)
    if result.seconds is None:
        return {"why": result.why, "note": "", "seconds": None}
    moving = result.bytes_in / link.read_bps, result.bytes_out / link.write_bps
    moving_s = sum(moving) if link.in_turns else max(moving)
    stats = [step.stats for step in side.steps]

    def mean(key: str, inner: str) -> float:
        return fmean(one[key][inner] for one in stats)

    def middle(name: str) -> float | None:
        known = [t for one in stats if (t := one["events_s"][name]) is not None]
        return median(known) if known else None

    return {
        "why": "",
        "seconds": result.seconds,
        "over_plain": _times(side, plain),
        "moving_s": moving_s,
        "over_limit": result.seconds / max(median_seconds(plain.steps), moving_s),
        "operators_s": operators_s,
        "stall_s": result.stall_s,
        "bytes_in": result.bytes_in,
        "bytes_out": result.bytes_out,
        "losses_equal": result.losses_equal,
        "note": result.note,
        "parts_s": {part: mean("parts_s", part) for part in PARTS},
        "kinds": {kind: mean("kinds", kind) for kind in KINDS},
        "events_s": {name: middle(name) for name in EVENTS},
        "main_cpu_s": fmean(one["cpu_s"][0] for one in stats),
        "other_cpu_s": fmean(one["cpu_s"][1] for one in stats),
    }


def _event(name: str) -> Cell:
    def text(row: Mapping[str, Any]) -> str:
        value = row["events_s"][name]
        return "–" if value is None else f"{value * 1e6:.0f} µs"

    return text


def _number(field: str, name: str, scale: float, digits: int) -> Cell:
    return lambda row: f"{row[field][name] * scale:.{digits}f}"


_STEPS: dict[str, Cell] = {
    "network": lambda row: row["case"],
    "way": lambda row: row["way"].replace("_", " "),
    "budget": lambda row: format_bytes(row["budget_bytes"]),
    "of the largest parameter": lambda row: f"{row['budget_bytes'] / row['largest_bytes']:.2f}",
    "plain": lambda row: format_seconds(row["plain_s"]),
    "a step": lambda row: format_seconds(row["seconds"]),
    "plain again, over plain": lambda row: f"{row['plain_again']:.2f}",
    "over plain": lambda row: f"{row['over_plain']:.2f}",
    "over max(plain, bytes / bandwidth)": lambda row: f"{row['over_limit']:.2f}",
    "over floor": lambda row: "–" if (f := row["over_floor"]) is None else f"{f:.2f}",
    "stall": lambda row: format_seconds(row["stall_s"]),
    "MB read": lambda row: f"{row['bytes_in'] / 1e6:.0f}",
    "written": lambda row: f"{row['bytes_out'] / 1e6:.0f}",
    "losses equal": lambda row: {True: "yes", False: "NO", None: ""}[row["losses_equal"]],
}
_PARTS: dict[str, Cell] = {
    "network": lambda row: row["case"],
    "way": lambda row: row["way"].replace("_", " "),
    **{part: _number("parts_s", part, 1e3, 1) for part in PARTS},
    "operators, plain": lambda row: f"{row['plain_operators_s'] * 1e3:.0f}",
    "here": lambda row: f"{(row['operators_s'] or 0) * 1e3:.0f}",
    "other threads": lambda row: f"{max(0.0, row['other_cpu_s']) * 1e3:.0f}",
    **{f"a {name}": _event(name) for name in EVENTS},
}
_KINDS: dict[str, Cell] = {
    "network": lambda row: row["case"],
    "way": lambda row: row["way"].replace("_", " "),
    **{kind: _number("kinds", kind, 1e-6, 0) for kind in KINDS},
    "integers and masks, of all saved": lambda row: f"{row['integers']:.2%}",
}
