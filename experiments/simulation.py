"""Compares simulated with real steps: step time and bytes moved, setting by setting.

The runtime trains networks under budgets, each in its own process. The same steps are simulated
(`dynoffload.simulation.training`) from traces of plain training. Nothing is fitted to validation
settings: `dynoffload.doctor` measures the link, plain steps give the compute times, and the
runtime's overhead is fitted on other networks under other budgets
(`dynoffload.experiments.simulation_fit`). Processes compute with one thread, which leaves a core
for transfers where there are two.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from dynoffload.errors import ConfigError
from dynoffload.estimation.calibration import Fitted
from dynoffload.experiments import simulated_run
from dynoffload.experiments.comparing import Table, draw_diagonal, judged, marked
from dynoffload.experiments.harness import Experiment, Row, option, table
from dynoffload.experiments.networks import FIT, SETTINGS, Setting
from dynoffload.experiments.processes import ONE_THREAD, fresh
from dynoffload.experiments.simulated_run import Task
from dynoffload.experiments.simulation_fit import PHASES, Material, Real, fitted, simulated
from dynoffload.memory.spill import default_spill_dir
from dynoffload.pilot.progress import Report
from dynoffload.simulation import Link
from dynoffload.simulation.recorded import Network, Parameter, recorded
from dynoffload.units import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dynoffload.doctor import Tiers

STEP_MEDIAN, STEP_WORST, BYTES_WORST = 0.10, 0.20, 0.02
"""Target maximum relative errors."""
_MOST_STEPS = 10  # from the eleventh step on, a session may try steps without prefetch
_TIER_SECONDS, _TIER_BYTES = 0.2, 512 * MiB
TRACES, PILOT_NAME = "traces", "trained.pilot"
Value = TypeVar("Value")


_PILOTED = frozenset(one.network for one in SETTINGS if one.policy == "pilot")


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    steps: int = option(_MOST_STEPS, "of each run, at most 10: later ones may be trials")
    warmup: int = option(4, "of them, those that do not count")
    runs: int = option(3, "of each setting")
    only: tuple[str, ...] = option((), "of the validated networks; all by default")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)

    def __post_init__(self) -> None:
        if not self.warmup < self.steps <= _MOST_STEPS:
            raise ConfigError(
                f"steps={self.steps} with warmup={self.warmup}: take more steps than warmup and "
                f"at most {_MOST_STEPS}, as a session may try steps without prefetch from then on"
            )
        if self.only and not {one.network for one in SETTINGS}.intersection(self.only):
            known = ", ".join(dict.fromkeys(one.network for one in SETTINGS))
            named = ",".join(self.only)
            raise ConfigError(f"only={named!r} names no network that is validated: {known}")


class Simulated(Experiment[Params]):
    """A case is a validation setting; the settings of `FIT` are trained first.

    It does not resume, as the machine's speed drifts, and the fit with it.
    """

    parameters = Params
    resumes = False

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.materials: dict[str, Material] = {}
        self.spill = "" if params.spill_dir is None else str(params.spill_dir)

    @cached_property
    def folder(self) -> Path:
        """Folder for traces and pilots."""
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    @cached_property
    def fitted(self) -> tuple[Fitted, dict[Setting, tuple[Material, Real]]]:
        """The fitted machine, and the data of the fit."""
        steps, warmup, runs = self.params.steps, self.params.warmup, self.params.runs
        return fit_machine(steps, warmup, runs, self.folder, self.spill, self.report)

    def cases(self) -> Mapping[str, Setting]:
        only = self.params.only
        return {one.name: one for one in SETTINGS if not only or one.network in only}

    def run(self, case: Setting) -> Row:
        fit, steps, name = self.fitted[0], self.params.steps, case.network
        if name not in self.materials:
            learn = name in _PILOTED
            self.materials[name] = material(name, steps, self.folder, self.report, learn=learn)
        known = self.materials[name]
        pilot = str(self.folder / name / PILOT_NAME) if case.policy == "pilot" else ""
        self.report(case.name)
        real = _real(case, known, steps, self.params.runs, pilot, self.spill)
        return compared(case, known.timed(real.plain), real, fit, self.params.warmup)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        fit, cases = self.fitted
        return {
            "link": asdict(fit.machine.link),
            "interference": fit.machine.interference,
            "work": asdict(fit.work),
            "pace_s": fit.pace_s,
            "fitted_on": [
                compared(one, known, real, fit, self.params.warmup)
                for one, (known, real) in cases.items()
            ],
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        shown = table("real and simulated steps", _COLUMNS, result["rows"], ["policy"])
        return [shown, *said(result["rows"])]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        shades = {"pilot": "plan", "repeat": "compute", "on-demand": "fault"}
        panels = figure.subplots(1, 2)
        kinds = (("ms per step", STEP_WORST, _ms), ("MB moved per step", BYTES_WORST, _moved))
        for axes, (label, most, value) in zip(panels, kinds, strict=True):
            every = [value(row[side]) for row in result["rows"] for side in ("real", "simulated")]
            draw_diagonal(axes, color, every, most)
            for policy, shade in shades.items():
                mine = [row for row in result["rows"] if row["policy"] == policy]
                x, y = ([value(row[side]) for row in mine] for side in ("real", "simulated"))
                axes.scatter(x, y, color=color[shade], s=22, label=policy, zorder=3)
            axes.set(xlabel=f"real, {label}", ylabel="simulated")
        panels[0].legend(frameon=False)


# Running


def _tiers(spill: str) -> Tiers:
    from dynoffload.doctor import measure_tiers

    return measure_tiers(spill or default_spill_dir(), _TIER_SECONDS, file_bytes=_TIER_BYTES)


def _child(function: Callable[[Task], Value], task: Task) -> Value:
    name = f"{task.network}, {function.__name__}"
    return fresh(name, function, task, environment=ONE_THREAD)


def fit_machine(
    steps: int,
    warmup: int,
    runs: int,
    folder: Path,
    spill: str,
    report: Report,
) -> tuple[Fitted, dict[Setting, tuple[Material, Real]]]:
    """Measure the link, train the settings of `FIT`, and return the fitted machine and their
    results.

    Args:
        steps: of each run.
        warmup: first steps, which are not used.
        runs: of each setting.
        folder: for traces.
        spill: directory of the spill files, "" for the default.
        report: called with the progress.
    """
    report("the link", 0, None)
    tiers = _tiers(spill)
    materials = {
        name: material(name, steps, folder, report)
        for name in dict.fromkeys(one.network for one in FIT)
    }
    cases = {}
    for number, one in enumerate(FIT):
        report(one.name, number, len(FIT))
        known = materials[one.network]
        real = _real(one, known, steps, runs, "", spill)
        cases[one] = known.timed(real.plain), real
    link = Link(tiers.read_bps, tiers.write_bps, tiers.mixed_bps)
    fit = fitted([(*case, one.policy) for one, case in cases.items()], link, warmup)
    return fit, cases


def material(
    name: str,
    steps: int,
    folder: Path,
    report: Report,
    *,
    learn: bool = False,
) -> Material:
    """Train a network plainly and return its `Material`; its traces stay in ``folder``.

    Args:
        name: of the network, and of its subfolder, which has the traces in `TRACES`.
        steps: number of steps.
        folder: for traces, and for the pilot, as ``name`` / `PILOT_NAME`.
        report: called with the progress.
        learn: train a pilot to predict the steps' orders; otherwise the last order does.
    """
    from dynoffload.profiler import load_trace, trace_files

    own, traces = folder / name, folder / name / TRACES
    traces.mkdir(parents=True)
    task, pilot = Task(name, steps, str(traces)), ""
    if learn:
        report(f"{name}: learning a pilot", 0, None)
        pilot = _child(simulated_run.pilot, replace(task, folder=str(own)))
    report(f"{name}: plain steps", 0, None)
    found = _child(simulated_run.plain, replace(task, pilot=pilot))
    network = Network(
        tuple(Parameter(**one) for one in found["network"]["parameters"]),
        *(
            {path: tuple(every) for path, every in found["network"][key].items()}
            for key in ("owners", "nests")
        ),
    )
    made = [recorded(load_trace(path), network) for path in trace_files(traces)]
    # A parameter's optimizer state appears with its first gradient, so late steps have most.
    states = {number: sizes for one in made for number, sizes in one.states.items()}
    timed = tuple(
        replace(one, states=states).timed(*times)
        for one, times in zip(made, found["times"], strict=True)
    )
    held = sum(one.nbytes * (2 if one.trained else 1) for one in network.parameters)
    held += sum(sum(sizes.values()) for sizes in states.values())
    saved = max(one.saved_bytes for one in made)
    return Material(network, timed, tuple(found["orders"]), held + saved)


def _real(
    setting: Setting, material: Material, steps: int, runs: int, pilot: str, spill: str
) -> Real:
    task = Task(
        setting.network,
        steps,
        budget=int(setting.share * material.footprint),
        policy=setting.policy,
        pilot=pilot,
        spill_dir=spill,
    )
    from dynoffload.doctor import measure_moves

    found, plain, paces = [], [], []
    tiers, moves = _tiers(spill), measure_moves(spill or default_spill_dir())
    for _ in range(runs):
        reference = _child(simulated_run.timed, Task(setting.network, steps, spill_dir=spill))
        plain.append(reference["times"])
        paces.append(reference["pace_s"])
        found.append(_child(simulated_run.budgeted, task))
    return Real(
        tuple(one["steps"] for one in found),
        found[0]["sizing"],
        tuple((seconds, nbytes) for one in found for seconds, nbytes in one["fetches"]),
        found[0]["backend"],
        Link(tiers.read_bps, tiers.write_bps, tiers.mixed_bps),
        tuple(plain),
        median(paces),
        moves,
    )


# Comparing


def compared(setting: Setting, material: Material, real: Real, fit: Fitted, warmup: int) -> Row:
    """Return one setting's real and simulated numbers, and their relative errors."""
    machine, work = fit.on(real.link), fit.at(real.pace_s, real.moves)
    whole = simulated(material, real.sizing, setting.policy, machine, work)
    made, phases = whole.steps[warmup:], whole.phases[warmup:]
    own = {
        "seconds": median(step.seconds for step in made),
        "bytes_in": sum(step.bytes_in for step in made) / len(made),
        "bytes_out": sum(step.bytes_out for step in made) / len(made),
        **{key: median(step[index].seconds for step in phases) for index, key in enumerate(PHASES)},
    }
    ran = {
        **{key: median(real.per_step(key)[warmup:]) for key in ("seconds", *PHASES)},
        **{key: median(_means(real, key, warmup)) for key in ("bytes_in", "bytes_out")},
    }
    moved = [own["bytes_in"] + own["bytes_out"], ran["bytes_in"] + ran["bytes_out"]]
    totals = [a + b for a, b in zip(*(_means(real, k, warmup) for k in _BYTES), strict=True)]
    return {
        **asdict(setting),
        "backend": real.backend,
        "budget": real.sizing["budget"],
        "link": {key: getattr(real.link, key) for key in ("read_bps", "write_bps", "mixed_bps")},
        "pace_s": real.pace_s,
        "moves": real.moves,
        "plain_s": median(sum(step.seconds) for step in material.steps[warmup:]),
        "real": ran,
        "simulated": own,
        "seconds_error": own["seconds"] / ran["seconds"] - 1,
        "bytes_error": _error(*moved),
        "bytes_spread": (max(totals) - min(totals)) / median(totals) if moved[1] else 0.0,
        "runs": [median(step["seconds"] for step in one[warmup:]) for one in real.runs],
    }


_BYTES = ("bytes_in", "bytes_out")


def _means(real: Real, key: str, warmup: int) -> list[float]:
    """Return each run's mean of ``key`` per step. It is a mean over consecutive steps, as
    transfers that outlast a step count in the next."""
    return [sum(step[key] for step in one[warmup:]) / len(one[warmup:]) for one in real.runs]


def _error(ours: float, theirs: float) -> float:
    return ours / theirs - 1 if theirs else float(ours > 0)


def said(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Report whether the targets hold."""
    middle = median(abs(row["seconds_error"]) for row in rows)
    return [
        judged("step time", [row["seconds_error"] for row in rows], STEP_WORST),
        f"its median error is asked to be at most {STEP_MEDIAN:.0%}: "
        + ("holds" if middle <= STEP_MEDIAN else "missed"),
        judged("bytes moved", [row["bytes_error"] for row in rows], BYTES_WORST),
    ]


def _ms(one: Mapping[str, float]) -> float:
    return one["seconds"] * 1e3


def _moved(one: Mapping[str, float]) -> float:
    return (one["bytes_in"] + one["bytes_out"]) / 1e6


def _mb(side: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row[side][key] / 1e6:.1f}"


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "network": lambda row: row["network"],
    "budget": lambda row: f"{row['share']:.3g}",
    "policy": lambda row: row["policy"],
    "real ms": lambda row: f"{_ms(row['real']):.0f}",
    "simulated ms": lambda row: f"{_ms(row['simulated']):.0f}",
    "time error": lambda row: marked(row["seconds_error"], STEP_WORST),
    "real MB in": _mb("real", "bytes_in"),
    "out": _mb("real", "bytes_out"),
    "simulated MB in": _mb("simulated", "bytes_in"),
    "simulated out": _mb("simulated", "bytes_out"),
    "bytes error": lambda row: marked(row["bytes_error"], BYTES_WORST),
    "runs differ by": lambda row: f"{row['bytes_spread']:.1%}",
}
