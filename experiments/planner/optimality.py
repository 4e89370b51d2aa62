"""How far a planner that may recompute is from the exact optimum, and how long it takes.

Small problems, drawn and recorded, are planned and also solved as mixed-integer programs (see
`exact`). What the solver does not prove within its time is reported and not counted. With ``--json
PATH`` numbers are written as they come, and the figure beside them; ``--resume`` takes the optima
that are there and plans anew. Then large steps are planned, for the planner's own time.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dynoffload.errors import BudgetError, ConfigError
from dynoffload.experiments import write_json
from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.experiments.idioms import trained
from dynoffload.experiments.planner.blocks import plan_blocks
from dynoffload.experiments.planner.cases import BUDGETS, LINKS, Case, drawn, read, recorded
from dynoffload.experiments.planner.exact import Optimum, optimum
from dynoffload.experiments.planner.plan import check
from dynoffload.experiments.planner.problem import Problem
from dynoffload.experiments.planner.search import plan
from dynoffload.experiments.planner.step import Step, step_of
from dynoffload.experiments.planner.views import draw, show
from dynoffload.pilot.progress import progress_bar
from dynoffload.profiler import Trace, resolve

RECORDED = ("moe", "tree", "gpt2", "opt")
"""Networks whose steps are read, in every budget and on every link."""
DEEP = "gpt2"
"""Whose steps are planned for the time it takes, with as many layers as that needs."""
SHARE = 0.35
"""Where the budget of such a step lies between its largest use and all that is ever alive."""
REPEATS = 5


def run(
    json_path: Path | None = None,
    *,
    seeds: int = 200,
    networks: tuple[str, ...] = RECORDED,
    time_limit: float = 12.0,
    operators: tuple[int, ...] = (2_500, 5_000, 10_000),
    resume: bool = False,
) -> dict[str, Any]:
    """Compare, and time.

    Args:
        json_path: numbers so far are written here.
        seeds: how many problems are drawn.
        networks: whose steps are read; of the zoo, or of `ARCHITECTURES`.
        time_limit: seconds that the solver has for one problem.
        operators: of the steps that planning is timed on.
        resume: take from ``json_path`` the optima of the same problems.

    Raises:
        ConfigError: nothing is to be compared, or there is nothing to resume.
    """
    solved: dict[str, Optimum] = {}
    if resume:
        if json_path is None or not json_path.exists():
            raise ConfigError("--resume goes on from the file that --json names: there is none")
        for row in json.loads(json_path.read_text(encoding="utf-8"))["rows"]:
            solved[row["digest"]] = Optimum(row["optimum_s"], row["bound_s"], row["proven"])
    rows: list[dict[str, Any]] = []
    todo = list(_cases(seeds, networks))
    with progress_bar(True) as report:
        for number, (name, make) in enumerate(todo):
            report(name, number, len(todo))
            rows.append(compared(make(), time_limit, solved))
            if json_path is not None and not resume and number % 20 == 19:
                write_json(json_path, {"rows": rows})
    if not rows:
        raise ConfigError("no problem to compare on: give --seeds or --networks")
    result = {**summary(rows), "time_limit_s": time_limit, "scaling": scaling(operators)}
    result["rows"] = rows
    show(result)
    if json_path is not None:
        draw(result, json_path.with_suffix(".svg"))
    return result


def _cases(seeds: int, networks: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], Case]]]:
    for seed in range(seeds):
        yield f"drawn {seed}", partial(drawn, seed)
    for name in networks:
        if name:
            yield from _readings(name)


def _readings(name: str) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the problems of one network, which is trained once they are asked for."""
    steps: list[Step] = []

    def case(budget: str, link: str) -> Case:
        if not steps:
            steps.append(recorded(name))
        return read(name, steps[0], budget, link)

    for budget in BUDGETS:
        for link in LINKS:
            yield f"{name} {budget} {link}", partial(case, budget, link)


def compared(
    case: Case, time_limit: float, solved: Mapping[str, Optimum] | None = None
) -> dict[str, Any]:
    """Return what the planner and the solver found for one problem.

    Args:
        case: the problem.
        time_limit: seconds that the solver has.
        solved: optima that are known, by the digest of the problem.
    """
    problem = case.problem
    began = time.process_time()
    found = plan(problem)
    planned = time.process_time() - began
    check(found)
    digest = digest_of(problem)
    best = (solved or {}).get(digest) or optimum(problem, time_limit)
    return {
        "case": case.name,
        "digest": digest,
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


def digest_of(problem: Problem) -> str:
    """Return what the problem is known by, in files too."""
    return hashlib.sha256(repr(problem).encode()).hexdigest()[:16]


def _seconds(problem: Problem, **without: bool) -> float | None:
    """Return the seconds of a plan without one of its means, None if there is none."""
    try:
        return plan(problem, **without).seconds
    except BudgetError:
        return None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the gaps over all problems that were solved, and by kind of problem."""
    counted = [row for row in rows if row["proven"]]
    return {
        "problems": len(rows),
        "proven": len(counted),
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


def _gaps(rows: list[dict[str, Any]]) -> dict[str, Any]:
    gaps = sorted(row["gap"] for row in rows)
    if not gaps:
        return {"counted": 0, "mean_gap": None, "worst_gap": None, "exact": 0}
    return {
        "counted": len(gaps),
        "mean_gap": statistics.fmean(gaps),
        "worst_gap": gaps[-1],
        "exact": sum(gap < 1e-4 for gap in gaps),
    }


def scaling(operators: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the seconds from recorded steps of about so many operators to their plans."""
    return [_planned(deep(count)) for count in operators]


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


def _planned(trace: Trace) -> dict[str, Any]:
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
