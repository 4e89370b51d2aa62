"""Benefit of prediction: stalls, waste and time in real runs at an eighth of the footprint.

Dynamic networks train on files that their pilot has not seen: plainly, on demand, by the order
recorded first, by the last order, by the pilot, and with perfect predictions ("clairvoyant"). Their
processes take turns on the same samples. The budget is an eighth of the footprint, more where one
update needs more. The first steps are not measured: in them a session tests whether prefetch pays
(`dynoffload.runtime.migration.gates`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import (
    Contestant,
    Side,
    Step,
    Turns,
    Way,
    measure,
    median_seconds,
)
from dynoffload.experiments.harness import Cell, Experiment, Row, check_known, option, table
from dynoffload.experiments.pilot_recording import Case, learned
from dynoffload.experiments.processes import WorkerError
from dynoffload.experiments.ways import BUDGETED, REPLAY, Spec
from dynoffload.pilot.progress import Report
from dynoffload.runtime.migration.gates import SETTLING, TRIED, WATCHED
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE = 0.125
"""Budget as a share of the footprint."""
WARMUP = SETTLING + WATCHED + SETTLING + TRIED + SETTLING
"""Steps until the first trial of prefetch is over, if there is one."""
ASKED: dict[str, tuple[float, str]] = {
    "stall_over_on_demand": (0.25, "stall over on demand"),
    "stall_over_recorded": (0.5, "stall over recorded"),
    "step_over_clairvoyant": (1.05, "step over clairvoyant"),
    "wasted": (0.10, "wasted prefetch"),
}
"""Ratio of the pilot's run -> its target maximum, and its title in tables."""
_PILOT, _CLAIRVOYANT = "pilot", "clairvoyant"
POLICIES: dict[str, dict[str, Any]] = {
    "on_demand": {"config": {"policy": "on-demand"}},
    "recorded": {"mode": REPLAY},
    "repeat": {"config": {"policy": "repeat"}},
    _PILOT: {"config": {"policy": "pilot"}},
    _CLAIRVOYANT: {"config": {"policy": "pilot"}, "clairvoyant": True},
}
"""Key of the JSON -> options of `Spec`."""
_SHADES = dict(zip(POLICIES, ("fault", "evict", "rss", "plan", "optimizer"), strict=True))


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    only: tuple[str, ...] = option((), "networks, by key; all by default")
    size: str = option("small", "preset of the networks: tiny or small")
    samples: int = option(160, "recorded steps that a pilot learns from")
    steps: int = option(40, "measured steps of each run, at least")
    warmup: int = option(WARMUP, "steps before them")
    per_turn: int = option(4, "measured steps of a turn")
    share: float = option(SHARE, "of the footprint that a budget is, at least")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)


def networks(size: str) -> dict[str, tuple[Case, float]]:
    """Return the networks by key, each with its least share of the footprint.

    Args:
        size: preset of the networks: ``tiny`` or ``small``.
    """
    found = (
        (Case("moe_8", "moe", f"{size}-wide", {"length": 8}, "top-2 of 64, 8 tokens"), SHARE),
        (Case("moe_64", "moe", f"{size}-wide", {"length": 64}, "top-2 of 64, 64 tokens"), SHARE),
        (Case("switch", "switch", size, {"length": 64}, "Switch, 32 experts, 64 tokens"), SHARE),
        (Case("depths", "depths", size, {"length": 16}, "mixture of depths, 16 tokens"), SHARE),
        (Case("gan", "gan", size, title="unrolled GAN"), 0.2),
        (Case("tree", "tree", size, title="Child-Sum Tree-LSTM"), 0.5),
    )
    return {case.key: (case, share) for case, share in found}


class PilotBenefit(Experiment[Params]):
    """A case is a network, for which a pilot is trained, under a budget."""

    parameters = Params
    height = 7.4

    def cases(self) -> Mapping[str, tuple[Case, float]]:
        known = networks(self.params.size)
        check_known("only", self.params.only, known)
        return {name: known[name] for name in self.params.only or known}

    def run(self, case: tuple[Case, float]) -> Row:
        (one, least), own = case, self.params
        share = max(own.share, least)
        turns = Turns(-(-own.steps // own.per_turn), own.warmup, own.per_turn)
        where = None if own.spill_dir is None else str(own.spill_dir)
        spec = Spec(one.network, one.preset, shape=one.shape, lr=one.lr)
        with tempfile.TemporaryDirectory() as folder:
            pilot = str(Path(folder) / "case.pilot")
            footprint, _ = learned(spec, own.samples, self.report, Path(pilot))
            held_out: dict[str, Any] = {"split": "held-out", "data_seed": 1}
            spec = replace(spec, spill_dir=where, **held_out)
            orders, losses = plain_orders(spec, turns.steps, self.report)
            budget = int(share * footprint)
            ways = {
                key: Way(
                    replace(
                        spec,
                        budget=budget,
                        pilot=pilot if key == _PILOT else None,
                        **{"mode": BUDGETED, **of},
                    ),
                    orders=orders if key == _CLAIRVOYANT else (),
                )
                for key, of in POLICIES.items()
            }
            found = measure(spec, ways, turns, lambda key: self.report(f"{one.key}: {key}"))
        return {
            "title": one.title,
            "share": share,
            "footprint_bytes": footprint,
            "budget_bytes": budget,
            "paths": len({tuple(order) for order in orders}),
            "steps": turns.steps,
            "largest_update_bytes": _largest_update(one, orders),
            "repeatable": losses == found.plain_losses,
            "runs": {
                "plain": {"step_s": median_seconds(found.plain)},
                **{key: numbers(found.steps[key], found.sides[key]) for key in POLICIES},
            },
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {row["case"]: ratios(row) for row in rows}

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        rows, every = result["rows"], result["summary"]
        runs = [
            {**row, "run": key, **row["runs"][key]} for row in rows for key in ("plain", *POLICIES)
        ]
        with_ratios = [{**row, **every[row["case"]]} for row in rows]
        parts: list[Table | str] = [
            table("the pilot against the others", _RATIOS, with_ratios),
            table("runs", _RUNS, runs, words=("run", "losses")),
        ]
        for key, (most, title) in ASKED.items():
            known = [row for row in with_ratios if row[key] is not None]
            missed = [row["title"] for row in known if row[key] > most]
            where = f"; missed: {', '.join(missed)}" if missed else ""
            parts.append(f"{title} ≤ {most:g}: {len(known) - len(missed)} of {len(known)}{where}")
        return parts

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        rows = result["rows"]
        thick = 0.8 / len(_SHADES)
        panels = figure.subplots(1, 2, sharey=True)
        labels = {
            "stall_total_s": "stall over on demand, sums",
            "step_s": "step over on demand, medians",
        }
        for axes, (what, label) in zip(panels, labels.items(), strict=True):
            for number, (key, shade) in enumerate(_SHADES.items()):
                runs = [row["runs"] for row in rows]
                axes.barh(
                    [place + (number - 2) * thick for place in range(len(rows))],
                    [one[key][what] / (one["on_demand"][what] or 1.0) for one in runs],
                    height=thick,
                    color=color[shade],
                    label=key.replace("_", " "),
                )
            axes.set_xlabel(label)
            axes.grid(visible=True, axis="x")
        panels[0].set_yticks(range(len(rows)), [row["title"] for row in rows])
        panels[0].invert_yaxis()
        most = ASKED["stall_over_on_demand"][0]
        panels[0].axvline(most, color=color["budget"], linewidth=1, zorder=0)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=5, frameon=False)


def plain_orders(spec: Spec, steps: int, report: Report) -> tuple[list[list[str]], list[str]]:
    """Return the units visited by each step of a plain run, and its losses; it is not timed."""
    orders = []
    with ExitStack() as stack:
        watched = Contestant("watched", Way(replace(spec, watched=True)), required=True)
        watched.start(stack)
        for number in range(steps):
            report(f"{spec.network}: looking ahead", number, steps)
            orders.append(watched.step()["visited"])
        return orders, watched.losses


def _largest_update(case: Case, orders: Iterable[Iterable[str]]) -> int:
    """Return the bytes that the largest update of one visited module needs: weights, gradients
    and AdamW's two moments."""
    from dynoffload.experiments import zoo

    modules = dict(zoo.build(case.network, case.preset, device="meta").named_modules())
    visited = {path for order in orders for path in order}
    weights = (modules[path].parameters(recurse=False) for path in visited)
    return 4 * max(sum(int(p.nbytes) for p in own) for own in weights)


def numbers(steps: Sequence[Step], side: Side) -> dict[str, Any]:
    """Return what a run's measured steps took.

    Raises:
        WorkerError: it dropped out.
    """
    if side.why:
        raise WorkerError(side.why)

    def of(name: str) -> list[Any]:
        return [step.stats[name] for step in steps]

    known = [accuracy for accuracy in of("accuracy") if accuracy is not None]
    return {
        "step_s": side.seconds,
        "each_step_s": side.steps_s,
        "each_prefetched": of("prefetched_bytes"),
        "stall_s": side.stall_s,
        "stall_total_s": sum(of("stall_s")),
        "stalls": median(of("stalls")),
        "bytes_in": int(median(of("bytes_in"))),
        "bytes_out": int(median(of("bytes_out"))),
        "prefetched_bytes": sum(of("prefetched_bytes")),
        "wasted_bytes": sum(of("wasted_bytes")),
        "steps_on_demand": sum(not one for one in of("prefetched_bytes")),
        "accuracy": fmean(known) if known else None,
        "peak_fast_bytes": side.peak_fast_bytes,
        "losses_equal": side.losses_equal,
        "steps": len(steps),
    }


# Results


def ratios(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratios of the pilot's run to the others; None where the divisor is zero or absent.

    Times are medians over steps, or medians of ratios on the same sample. Stalls are sums over all
    steps, as in the targets.
    """
    runs = case["runs"]
    pilot = runs["pilot"]

    def stalls(key: str, run: Mapping[str, Any] = pilot) -> float | None:
        stalled: float = runs[key]["stall_total_s"]
        return run["stall_total_s"] / stalled if stalled else None

    over = {key: paired(pilot, runs[key]) for key in ("repeat", "on_demand")}
    clairvoyant = paired(pilot, runs["clairvoyant"], both=True)
    fetched = pilot["prefetched_bytes"]
    return {
        "step_over_plain": pilot["step_s"] / runs["plain"]["step_s"],
        **{f"step_over_{key}": None if one is None else one[0] for key, one in over.items()},
        "step_over_clairvoyant": None if clairvoyant is None else clairvoyant[0],
        "step_over_clairvoyant_range": None if clairvoyant is None else clairvoyant[1:],
        **{f"stall_over_{key}": stalls(key) for key in ("repeat", "on_demand", "recorded")},
        "clairvoyant_stall_over_on_demand": stalls("on_demand", runs["clairvoyant"]),
        "wasted": pilot["wasted_bytes"] / fetched if fetched else None,
        "largest_update": case["largest_update_bytes"] / case["budget_bytes"],
    }


def paired(
    run: dict[str, Any], other: dict[str, Any], *, both: bool = False
) -> tuple[float, float, float] | None:
    """Return the ratio of two runs' step times, paired by sample.

    Args:
        run: the numerator.
        other: the denominator.
        both: leave out samples on which either run prefetched nothing, as in a trial.

    Returns:
        The median, which is robust to differing sample sizes, and its 90% bootstrap interval
        over samples; None if all are left out.
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


def _ratio(key: str) -> Cell:
    """Return a cell with a ratio, its range, and a mark if it misses its target."""

    def text(row: Mapping[str, Any]) -> str:
        if row[key] is None:
            return "–"
        around = row.get(f"{key}_range")
        within = "" if around is None else f" [{around[0]:.2f}, {around[1]:.2f}]"
        missed = key in ASKED and row[key] > ASKED[key][0]
        return f"{row[key]:.2f}{within}" + (" (missed)" if missed else "")

    return text


def _wasted(row: Mapping[str, Any]) -> str:
    fetched = row.get("prefetched_bytes")
    return f"{row['wasted_bytes'] / fetched:.1%}" if fetched else "–"


def _unfetched(row: Mapping[str, Any]) -> str:
    if row["run"] in ("plain", "on_demand"):
        return "–"
    return f"{row['steps_on_demand']} of {row['runs'][row['run']]['steps']}"


def _losses(row: Mapping[str, Any]) -> str:
    if row["run"] == "plain":
        return "–"
    if not row["repeatable"]:
        return "plain differs from plain"
    return "equal" if row["losses_equal"] else "NOT EQUAL"


_RATIOS: dict[str, Cell] = {
    "network": lambda row: row["title"],
    "step over plain": _ratio("step_over_plain"),
    "step over repeat-last": _ratio("step_over_repeat"),
    "step over on demand": _ratio("step_over_on_demand"),
    "stall over repeat-last": _ratio("stall_over_repeat"),
    "clairvoyant's stall over on demand": _ratio("clairvoyant_stall_over_on_demand"),
    **{title: _ratio(key) for key, (_, title) in ASKED.items()},
    "largest update over the budget": _ratio("largest_update"),
}
_RUNS: dict[str, Cell] = {
    "network": lambda row: row["title"],
    "paths": lambda row: str(row["paths"]),
    "budget": lambda row: f"{format_bytes(row['budget_bytes'])}, {row['share']:.1%}",
    "run": lambda row: row["run"].replace("_", " "),
    "step": lambda row: format_seconds(row["step_s"]),
    "stall": lambda row: format_seconds(row["stall_s"]) if "stall_s" in row else "–",
    "wasted": _wasted,
    "on demand": _unfetched,
    "order": lambda row: "–" if row.get("accuracy") is None else f"{row['accuracy']:.1%}",
    "losses": _losses,
}
