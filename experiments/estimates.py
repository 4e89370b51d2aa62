"""Compares estimates with real trainings: peaks and step time, network by network.

Networks of the zoo and of transformers are estimated by `dynoffload.estimation`, and trained under
the same budgets. The calibration of `dynoffload.experiments.simulation` was fitted to other
networks. Processes compute with one thread, which leaves a core for transfers where there are two.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from dynoffload.errors import BudgetError, ConfigError
from dynoffload.experiments.comparing import Table, draw_diagonal, judged, marked
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.experiments.networks import FIT
from dynoffload.experiments.processes import NEVER_LEFT, ONE_THREAD, fresh
from dynoffload.experiments.trainer import Trainer
from dynoffload.experiments.ways import BUDGETED, Spec, adamw, network, samples
from dynoffload.units import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETWORKS = (
    *("moe", "tree", "evoformer", "esmfold"),
    *("t5", "mixtral", "gpt2", "bert", "llama", "vit"),
)
"""Four of the zoo, six of transformers; the calibration includes none of them."""
KINDS_FITTED = frozenset(one.network.removesuffix(" (fit)") for one in FIT)
"""Networks whose architecture is in the calibration of the runtime's overhead, with other
sizes."""
PEAK_WORST, STEP_WORST = 0.10, 0.20
"""Target maximum relative errors."""
_ERRORS = {
    "step_error": ("step time", STEP_WORST),
    "fast_error": ("fast memory", PEAK_WORST),
    "file_error": ("spill file", PEAK_WORST),
}
_CONFIG = {"policy": "repeat"}
_MOST_STEPS = 10  # from the eleventh step on, a session may try steps without prefetch
_SAMPLES = 6  # as many as an estimate uses
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    shares: tuple[float, ...] = option(
        (0.5, 0.25), "of parameters, gradients and optimizer state, that are the budgets"
    )
    only: tuple[str, ...] = option((), "networks; all by default")
    steps: int = option(10, "of each training")
    warmup: int = option(4, "of them, those that do not count")
    runs: int = option(2, "trainings of each, of which the median counts")
    calibration: Path | None = option(None, "what experiment simulation has written here")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)

    def __post_init__(self) -> None:
        check_known("only", self.only, NETWORKS)
        if not 0 < self.warmup < self.steps <= _MOST_STEPS:
            raise ConfigError(
                f"warmup={self.warmup} of steps={self.steps}: leave some steps that count, of "
                f"{_MOST_STEPS} at most"
            )


class Estimates(Experiment[Params]):
    """A case is a network under a share of its footprint."""

    parameters = Params

    def cases(self) -> Mapping[str, tuple[str, float]]:
        pairs = itertools.product(self.params.only or NETWORKS, self.params.shares)
        return {f"{name}, {share:g}": (name, share) for name, share in pairs}

    def run(self, case: tuple[str, float]) -> Row:
        name, share = case

        def child(function: Any, *args: Any) -> Any:
            what = f"{name}, {function.__name__}"
            return fresh(what, function, name, *args, patience=_TIMEOUT_S, environment=ONE_THREAD)

        spill_dir, steps = self.params.spill_dir, self.params.steps
        budget = int(share * child(footprint))
        ours, seconds = child(estimated, budget, self.params.calibration, spill_dir)
        real = [
            child(trained, budget, steps, self.params.warmup, spill_dir)
            for _ in range(self.params.runs)
        ]
        return compared(name, share, ours, real, seconds)

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        shown = table("estimated and real", _COLUMNS, result["rows"], ["bound by"])
        return [shown, *said(result["rows"])]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        shown = [row for row in result["rows"] if row["real"]]
        step = (("step_s", 1e3, "compute", "step"),)
        peaks = (
            ("fast_peak", 1 / MiB, "plan", "fast memory"),
            ("file_peak", 1 / MiB, "fault", "spill file"),
        )
        kinds = (("ms per step", STEP_WORST, step), ("MiB at the peak", PEAK_WORST, peaks))
        for axes, (label, most, series) in zip(figure.subplots(1, 2), kinds, strict=True):
            every: list[float] = []
            for key, scale, shade, name in series:
                real = [row["real"][key] * scale for row in shown]
                ours = [row["estimated"][key] * scale for row in shown]
                every += real + ours
                axes.scatter(real, ours, s=22, color=color[shade], label=name, zorder=3)
            if every:
                draw_diagonal(axes, color, every, most)
                axes.set(xlabel=f"real, {label}", ylabel="estimated")
                axes.legend(frameon=False, loc="upper left")


# Run in child processes


def footprint(name: str) -> int:
    """Return the bytes of a network's parameters, gradients and optimizer state."""
    from dynoffload.runtime.counting import whole_bytes

    model = network(Spec(name, ""))
    return whole_bytes(model, adamw(model, Spec(name, "")))


def estimated(
    name: str, budget: int, calibration: Path | None, spill_dir: Path | None
) -> tuple[dict[str, Any], float]:
    """Return the estimate, and the seconds it took."""
    from dynoffload.estimation import estimates

    spec = Spec(name, "")
    model = network(spec)
    begin = time.perf_counter()
    (found,) = estimates(
        model,
        samples(spec),
        budgets=(budget,),
        optimizer=adamw(model, spec),
        config=_CONFIG,
        spill_dir=spill_dir,
        calibration=calibration,
    )
    return asdict(found), time.perf_counter() - begin


def trained(
    name: str, budget: int, steps: int, warmup: int, spill_dir: Path | None
) -> dict[str, Any]:
    """Train under a budget; return step times and peaks."""
    where = None if spill_dir is None else str(spill_dir)
    options: dict[str, Any] = {"mode": BUDGETED, "config": _CONFIG, "spill_dir": where}
    trainer = Trainer(Spec(name, "", budget=budget, **options))
    trainer.samples = itertools.cycle(list(itertools.islice(trainer.samples, _SAMPLES)))
    try:
        NEVER_LEFT.enter_context(trainer.training())
    except BudgetError as error:
        return {"refused": str(error)}
    seconds, file = list[float](), 0
    for _ in range(steps):
        seconds.append(trainer.step()["seconds"])
        file = max(file, trainer.session.spill_bytes)
    made = trainer.session.log.steps
    return {
        "refused": "",
        "step_s": fmean(seconds[warmup:]),
        "steps_s": seconds,
        "fast_peak": max(step.peak_fast_bytes for step in made),
        "file_peak": file,
        "bytes_in": fmean(step.bytes_in for step in made[warmup:]),
        "bytes_out": fmean(step.bytes_out for step in made[warmup:]),
    }


# Arithmetic


def compared(
    network: str,
    share: float,
    ours: Mapping[str, Any],
    real: Sequence[Mapping[str, Any]],
    seconds: float,
) -> Row:
    """Return one budget's estimated and real numbers, and their relative errors.

    If only one side refuses the budget, every error is 100%.
    """
    refused = bool(real[0]["refused"])
    base = {
        "network": network,
        "share": share,
        "budget": ours["budget"],
        "estimate_s": seconds,
        "estimated": dict(ours),
        "refused": refused,
        "agrees": refused is not ours["feasible"],
    }
    if refused or not ours["feasible"]:
        return {**base, "real": {}, **dict.fromkeys(_ERRORS, 0.0 if base["agrees"] else 1.0)}
    keys = ("step_s", "fast_peak", "file_peak", "bytes_in", "bytes_out")
    ran = {key: median(one[key] for one in real) for key in keys}
    return {
        **base,
        "real": {**ran, "runs": [one["step_s"] for one in real]},
        **{
            error: ours[key] / ran[key] - 1
            for error, key in zip(_ERRORS, ("step_s", "fast_peak", "file_peak"), strict=True)
        },
    }


def said(rows: Sequence[Row]) -> list[str]:
    """Report whether the targets hold, excluding budgets that both sides refuse."""
    counted = [one for one in rows if one["real"] or not one["agrees"]]
    unseen = [one for one in counted if one["network"] not in KINDS_FITTED]
    lines = [
        judged(name, [one[key] for one in counted], most) for key, (name, most) in _ERRORS.items()
    ]
    if unseen:
        names = ", ".join(sorted({one["network"] for one in unseen}))
        what = f"step time of kinds that nothing was fitted to ({names})"
        lines.append(judged(what, [one["step_error"] for one in unseen], STEP_WORST))
    return lines


def _number(side: str, key: str, unit: float, decimals: int) -> Any:
    return lambda row: f"{row[side][key] / unit:.{decimals}f}" if row["real"] else ""


def _step(row: Mapping[str, Any]) -> str:
    if row["real"]:
        return f"{row['estimated']['step_s'] * 1e3:.0f}"
    return "too small, both say" if row["agrees"] else "too small, one says miss"


def _bound(ours: Mapping[str, Any]) -> str:
    return "nothing" if ours["resident"] else str(ours["bound"])


def _error(key: str) -> Any:
    return lambda row: marked(row[key], _ERRORS[key][1]) if row["real"] else ""


_COLUMNS = {
    "network": lambda row: row["network"],
    "budget": lambda row: f"{row['share']:.3g}",
    "estimated ms": _step,
    "real ms": _number("real", "step_s", 1e-3, 0),
    "step error": _error("step_error"),
    "fast MiB": _number("estimated", "fast_peak", MiB, 1),
    "real MiB": _number("real", "fast_peak", MiB, 1),
    "fast error": _error("fast_error"),
    "file MiB": _number("estimated", "file_peak", MiB, 1),
    "real file MiB": _number("real", "file_peak", MiB, 1),
    "file error": _error("file_error"),
    "bound by": lambda row: _bound(row["estimated"]) if row["real"] else "",
}
