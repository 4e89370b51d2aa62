"""Estimates beside real trainings: peaks and step time, network by network.

What it is: `dynoffload.estimation` asked of the zoo's networks and of six of transformers, and the
same networks trained under the same budgets; a table of both with its misses. What it is not: a fit
to what it validates; see `dynoffload.experiments.simulation` for what is fitted, to other networks.

Processes compute with one thread, so that transfers have a core of their own where there are two.
With ``--json PATH`` the figure is written beside it, as ``PATH`` with the suffix ``.svg``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.experiments.children import answer_of
from dynoffload.experiments.comparing import check_page
from dynoffload.experiments.estimates_run import ESTIMATED, TRAINED, Task
from dynoffload.experiments.estimates_views import (
    PEAK_WORST,
    STEP_WORST,
    show,
    write_figure,
    write_table,
)
from dynoffload.experiments.simulation import FIT
from dynoffload.pilot.progress import progress_bar

NETWORKS = (
    *("moe", "tree", "evoformer", "esmfold"),
    *("t5", "mixtral", "gpt2", "bert", "llama", "vit"),
)
"""Four of the zoo, six of transformers; none of them is fitted to."""
KINDS_FITTED = frozenset(one.network.removesuffix(" (fit)") for one in FIT)
"""Of whose kind another network, of other sizes, is among those that the runtime's own work is
fitted on."""
_MOST_STEPS = 10  # from the eleventh on a session may try steps without prefetch
_TIMEOUT_S = 600.0


def run(
    json_path: Path | None = None,
    *,
    shares: str = "0.5,0.25",
    only: str = "",
    steps: int = 10,
    warmup: int = 4,
    runs: int = 2,
    calibration: Path | None = None,
    page: Path | None = None,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Estimate, train, and compare.

    Args:
        json_path: the figure is written beside it.
        shares: of parameters, gradients and optimizer state, that are the budgets.
        only: networks, separated by commas; all without it.
        steps: of each training.
        warmup: of them, those that do not count.
        runs: trainings of each, of which the median counts.
        calibration: what ``experiment simulation --json`` wrote on this machine.
        page: a page whose table is written anew, between its marks.
        spill_dir: where the spill files lie.
    """
    check_page(page)
    names = [one for one in only.split(",") if one] or list(NETWORKS)
    unknown = [one for one in names if one not in NETWORKS]
    if unknown:
        raise ConfigError(f"only names {unknown[0]!r}: there are {', '.join(NETWORKS)}")
    if not 0 < warmup < steps <= _MOST_STEPS:
        raise ConfigError(
            f"warmup={warmup} of steps={steps}: leave some steps that count, of {_MOST_STEPS} at "
            "most"
        )
    try:
        parts = [float(share) for share in shares.split(",")]
    except ValueError as error:
        raise ConfigError(f"shares={shares!r}: write numbers, separated by commas") from error
    spill = "" if spill_dir is None else str(spill_dir)
    fitted = "" if calibration is None else str(calibration)
    rows = []
    with progress_bar(True) as report:
        for number, name in enumerate(names):
            report(name, number, len(names))
            whole = _child(Task(name, "footprint", ()))["bytes"]
            budgets = tuple(int(share * whole) for share in parts)
            ours = _child(Task(name, ESTIMATED, budgets, calibration=fitted, spill_dir=spill))
            for share, budget, one in zip(parts, budgets, ours["estimates"], strict=True):
                task = Task(name, TRAINED, (budget,), steps, warmup, spill_dir=spill)
                real = [_child(task) for _ in range(runs)]
                rows.append(row(name, share, one, real, ours["seconds"]))
    result = {
        "steps": steps,
        "warmup": warmup,
        "runs": runs,
        "calibration": fitted or "as shipped",
        "summary": summary(rows),
        "rows": rows,
    }
    show(result)
    if json_path is not None:
        write_figure(result, json_path.with_suffix(".svg"))
    if page is not None:
        write_table(result, page)
    return result


def _child(task: Task) -> dict[str, Any]:
    return answer_of("estimates_run", task, f"{task.network}, {task.mode},", _TIMEOUT_S)


def row(
    name: str,
    share: float,
    ours: Mapping[str, Any],
    real: Sequence[Mapping[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """Return one budget's numbers, estimated and real, and how far they are apart.

    A budget that one side calls too small and the other does not is wrong by all of it.
    """
    refused = bool(real[0]["refused"])
    base = {
        "network": name,
        "share": share,
        "budget": ours["budget"],
        "estimate_s": seconds,
        "estimated": dict(ours),
        "refused": refused,
        "agrees": refused is not ours["feasible"],
    }
    if refused or not ours["feasible"]:
        wrong = 0.0 if base["agrees"] else 1.0
        return {**base, "real": {}, "step_error": wrong, "fast_error": wrong, "file_error": wrong}
    keys = ("step_s", "fast_peak", "file_peak", "bytes_in", "bytes_out")
    ran = {key: median(one[key] for one in real) for key in keys}
    return {
        **base,
        "real": {**ran, "runs": [one["step_s"] for one in real]},
        "step_error": ours["step_s"] / ran["step_s"] - 1,
        "fast_error": ours["fast_peak"] / ran["fast_peak"] - 1,
        "file_error": ours["file_peak"] / ran["file_peak"] - 1,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many rows hit what is asked for, and the errors over all but those where both
    sides refuse the budget."""
    agreed = [one for one in rows if one["agrees"] and not one["real"]]
    counted = [one for one in rows if not (one["agrees"] and not one["real"])]
    found: dict[str, Any] = {"rows": len(counted), "both_refuse": len(agreed)}
    for key, most in (
        ("step_error", STEP_WORST),
        ("fast_error", PEAK_WORST),
        ("file_error", PEAK_WORST),
    ):
        found[key] = _errors([abs(one[key]) for one in counted], most)
    unseen = [one for one in counted if one["network"] not in KINDS_FITTED]
    names = sorted({one["network"] for one in unseen})
    errors = _errors([abs(one["step_error"]) for one in unseen], STEP_WORST)
    found["unseen"] = {"networks": names, "rows": len(unseen), **errors}
    return found


def _errors(errors: Sequence[float], most: float) -> dict[str, Any]:
    return {
        "median": median(errors) if errors else 0.0,
        "worst": max(errors, default=0.0),
        "within": sum(error <= most for error in errors),
        "holds": all(error <= most for error in errors),
    }
