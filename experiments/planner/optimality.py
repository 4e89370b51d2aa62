"""How far a planner that may recompute is from the exact optimum, and how long it takes.

Small problems, drawn and recorded, are planned and also solved as mixed-integer programs (see
`exact`). What the solver does not prove within its time is reported and not counted. Then large
steps are planned, for the planner's own time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from dynoffload.errors import BudgetError
from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, option, table
from dynoffload.experiments.idioms import trained
from dynoffload.experiments.planner.blocks import plan_blocks
from dynoffload.experiments.planner.cases import BUDGETS, LINKS, Case, drawn, read, recorded
from dynoffload.experiments.planner.exact import optimum
from dynoffload.experiments.planner.plan import check
from dynoffload.experiments.planner.problem import Problem
from dynoffload.experiments.planner.search import plan
from dynoffload.experiments.planner.step import Step, step_of
from dynoffload.profiler import Trace, resolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEEP = "gpt2"
"""Whose steps are planned for the time it takes, with as many layers as that needs."""
SHARE = 0.35
"""Where the budget of such a step lies between its largest use and all that is ever alive."""
REPEATS = 5
WORST = 0.10
"""The gap that is asked for at the most."""


@dataclass(frozen=True)
class Params:
    """What is compared."""

    seeds: int = option(200, "how many problems are drawn")
    networks: tuple[str, ...] = option(
        ("moe", "tree", "gpt2", "opt"), "whose steps are read, in every budget and on every link"
    )
    time_limit: float = option(12.0, "seconds that the solver has for one problem")
    operators: tuple[int, ...] = option(
        (2_500, 5_000, 10_000), "of the steps that planning is timed on"
    )


_COLORS = {"slow": "stall", "even": "plan", "fast": "optimizer"}


class Optimality(Experiment[Params]):
    """A case is a small problem, or a large step."""

    parameters = Params
    height = 3.2

    def cases(self) -> Mapping[str, Callable[[], Row]]:
        limit, step = self.params.time_limit, cache(recorded)
        found: dict[str, Callable[[], Row]] = {
            f"drawn {seed}": partial(_compared, partial(drawn, seed), limit)
            for seed in range(self.params.seeds)
        }
        for name in self.params.networks:
            for budget in BUDGETS:
                for link in LINKS:
                    case = partial(_read, step, name, budget, link)
                    found[f"{name} {budget} {link}"] = partial(_compared, case, limit)
        for count in self.params.operators:
            found[f"{count} operators"] = partial(_planned, count)
        return found

    def run(self, case: Callable[[], Row]) -> Row:
        return case()

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return summary([row for row in rows if "gap" in row])

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        found = result["summary"]
        kinds = [{"kind": "all", **found}]
        kinds += [
            {"kind": kind if by == "family" else f"{kind} {by}", **row}
            for by, rows in found["by"].items()
            for kind, row in rows.items()
        ]
        large = [row for row in result["rows"] if "gap" not in row]
        worst = found["not_proven_worst_gap_to_bound"]
        return [
            table("gaps", _GAPS, kinds),
            table("planning large steps", _LARGE, large),
            f"not proven: {len(found['not_proven'])}, at most {_percent(worst)} from a bound",
        ]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        first, second = figure.subplots(1, 2)
        rows = [row for row in result["rows"] if "gap" in row]
        _distribution(first, color, rows)
        _against_one(second, color, rows)


def _read(step: Callable[[str], Step], name: str, budget: str, link: str) -> Case:
    return read(name, step(name), budget, link)


def _compared(make: Callable[[], Case], time_limit: float) -> Row:
    return compared(make(), time_limit)


def compared(case: Case, time_limit: float) -> Row:
    """Return what the planner and the solver, in so many seconds, found for one problem."""
    problem = case.problem
    began = time.process_time()
    found = plan(problem)
    planned = time.process_time() - began
    check(found)
    best = optimum(problem, time_limit)
    return {
        "family": case.family,
        "budget": case.budget,
        "link": case.link,
        "uses": len(problem.uses),
        "regions": len(problem.sizes),
        "again": len(problem.again),
        "compute_s": problem.compute_s,
        "planned_s": found.seconds,
        "optimum_s": best.seconds,
        "bound_s": best.bound,
        "proven": best.proven,
        "gap": found.seconds / best.bound - 1,
        "recomputed": len(found.again),
        "moved": len(found.transfers),
        "moving_only_s": _seconds(problem, again=False),
        "recomputing_only_s": _seconds(problem, move=False),
        "cpu_s": planned,
    }


def _seconds(problem: Problem, **without: bool) -> float | None:
    """Return the seconds of a plan without one of its means, None if there is none."""
    try:
        return plan(problem, **without).seconds
    except BudgetError:
        return None


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the gaps over all problems that were solved, and by kind of problem."""
    counted = [row for row in rows if row["proven"]]
    return {
        "problems": len(rows),
        "not_proven": [row["case"] for row in rows if not row["proven"]],
        **_gaps(counted),
        "not_proven_worst_gap_to_bound": max(
            (row["gap"] for row in rows if not row["proven"]), default=None
        ),
        "by": {
            key: {
                kind: {
                    "problems": sum(row[key] == kind for row in rows),
                    **_gaps([row for row in counted if row[key] == kind]),
                }
                for kind in dict.fromkeys(row[key] for row in rows)
            }
            for key in ("family", "budget", "link")
        },
    }


def _gaps(rows: Sequence[Row]) -> dict[str, Any]:
    gaps = sorted(row["gap"] for row in rows)
    if not gaps:
        return {"counted": 0, "mean_gap": None, "worst_gap": None, "exact": 0}
    return {
        "counted": len(gaps),
        "mean_gap": statistics.fmean(gaps),
        "worst_gap": gaps[-1],
        "exact": sum(gap < 1e-4 for gap in gaps),
    }


def deep(operators: int) -> Trace:
    """Return a step of a decoder with about as many operators."""
    torch.manual_seed(0)
    shallow = len(_decoder(2).operators)
    layer = len(_decoder(3).operators) - shallow
    return _decoder(max(1, round((operators - shallow) / layer) + 2))


def _decoder(layers: int) -> Trace:
    architecture = ARCHITECTURES[DEEP]
    options = {**architecture.options, "n_layer": layers}
    return trained(replace(architecture, options=options), 2)[-1]


def _planned(operators: int) -> Row:
    """Return the seconds from a recorded step of about so many operators to its plan."""
    trace = deep(operators)
    program, taken = resolve(trace), []
    for _ in range(REPEATS):
        began = time.process_time()
        step = step_of(trace, program).at_visits()
        least, most = step.extent()
        compute = sum(use.seconds for use in step.uses)
        blocks, found = plan_blocks(step, least + int(SHARE * (most - least)), most / compute)
        taken.append(time.process_time() - began)
    return {
        "operators": len(trace.operators),
        "visits": len(step.uses),
        "blocks": len(blocks.uses),
        "regions": len(blocks.sizes),
        "cpu_s": statistics.median(taken),
        "cpu_worst_s": max(taken),
        "planned_s": found.seconds,
        "compute_s": compute,
    }


def _distribution(axes: Axes, color: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Draw which share of the problems has at most which gap."""
    for link, paint in _COLORS.items():
        of = [row for row in rows if row["link"] == link and row["proven"]]
        gaps = sorted(100 * max(0.0, row["gap"]) for row in of)
        shares = [100 * (place + 1) / len(gaps) for place in range(len(gaps))]
        axes.step(gaps, shares, where="post", color=color[paint], label=f"{link} link")
    axes.axvline(100 * WORST, color=color["stall"], linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlim(-0.2, 100 * WORST + 0.5)
    axes.set_ylim(0, 102)
    axes.set_xlabel("step longer than the optimum by at most, %")
    axes.set_title("problems, %", loc="left", fontsize=8.5)
    axes.legend(frameon=False, loc="lower right")


def _against_one(axes: Axes, color: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Draw what a step takes with one means alone, against both."""
    shown = {
        "moving_only_s": ("moving alone", "stall"),
        "recomputing_only_s": ("recomputing", "fault"),
    }
    for key, (label, paint) in shown.items():
        ratios = sorted(row[key] / row["planned_s"] for row in rows if row[key] is not None)
        x = [100 * place / max(1, len(ratios) - 1) for place in range(len(ratios))]
        axes.plot(x, ratios, color=color[paint], linewidth=1.4, label=label)
    axes.set_xlabel("problems, %")
    axes.set_title("times as long as with both", loc="left", fontsize=8.5)
    axes.set_ylim(0.95, None)
    axes.legend(frameon=False, loc="upper left")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


_GAPS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "": lambda row: row["kind"],
    "problems": lambda row: str(row["problems"]),
    "proven": lambda row: str(row["counted"]),
    "optimal": lambda row: str(row["exact"]),
    "mean gap": lambda row: _percent(row["mean_gap"]),
    "worst gap": lambda row: _percent(row["worst_gap"]),
}
_LARGE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "operators": lambda row: f"{row['operators']:,}",
    "visits": lambda row: str(row["visits"]),
    "blocks": lambda row: str(row["blocks"]),
    "regions": lambda row: str(row["regions"]),
    "CPU s, median": lambda row: f"{row['cpu_s']:.2f}",
    "worst": lambda row: f"{row['cpu_worst_s']:.2f}",
}
