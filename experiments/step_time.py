"""Time per training step over budgets, for every policy: measured beside simulated.

What it is: dynamic networks under budgets from all of what their training keeps down to a
sixteenth; each policy trains for real, in a process of its own, in turns with plain training and
the other policies on the same samples, and the same steps are simulated from plain ones. A policy
that can only be measured, or only be simulated, is shown by that side. What it is not: a search for
what fits (`capacity`, `max-batch`), nor the validation of the simulation (`simulation`), from which
it takes the fit of this machine. A budget that a policy cannot run under is reported with its
reason.

Processes compute with one thread, so that transfers have a core of their own where there are two.
With ``--json PATH`` the figure is written beside it, as ``PATH`` with the suffix ``.svg``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.experiments import make_room, write_json
from dynoffload.experiments.simulation import PILOT_NAME, TRACES, material
from dynoffload.experiments.simulation_fit import Fit
from dynoffload.experiments.step_time_policies import (
    PILOT,
    POLICIES,
    described,
    replayed,
    simulated,
)
from dynoffload.experiments.step_time_rows import merged, plain_row, row_of, summary
from dynoffload.experiments.step_time_runs import LEAST_S, Measured, Turns, measure
from dynoffload.experiments.trainer import Spec
from dynoffload.experiments.zoo import TRUNK
from dynoffload.memory.spill import default_spill_dir
from dynoffload.pilot.progress import Report, progress_bar

FASTER = 1.38
"""The most by which prediction is faster than the other policies, as published for this way of
offloading: than unified memory and rematerialisation."""
BUDGETS = ("1", "1/2", "1/4", "1/8", "1/16")
_FOLDS = {"min_length": 16, "max_length": 24, "min_depth": 4, "max_depth": 8, "max_cycles": 3}
PRESETS: dict[str, dict[str, Spec]] = {
    "tiny": {
        "moe": Spec("moe", "tiny", shape={"rows": 1, "length": 16}),
        "tree": Spec("tree", "tiny-untied", shape={"max_nodes": 16}),
        TRUNK: Spec(TRUNK, "tiny", shape={"rows": 1, **_FOLDS}),
    },
    "small": {
        "moe": Spec(
            "moe",
            "tiny",
            sizes={"hidden": 256, "width": 512, "layers": 4},
            shape={"rows": 1, "length": 24},
        ),
        "tree": Spec(
            "tree",
            "tiny-untied",
            sizes={"hidden": 512, "embedding": 256},
            shape={"max_nodes": 24},
        ),
        TRUNK: Spec(TRUNK, "small", sizes={"blocks": 2}, shape={"rows": 4, **_FOLDS}),
    },
}
"""Networks by preset and name."""
_LEAST_STEPS, _THREADS = 5, 1
_UNDIVIDED = "no measured policy says how the runtime would divide the budget: ask for one, too"
_ALL_REFUSED = "no measured policy runs under this budget, so none says how it would be divided"


@dataclass(frozen=True)
class _Asked:
    """What one call of `run` compares."""

    policies: tuple[str, ...]
    budgets: tuple[Fraction, ...]
    turns: Turns
    repeat: int
    learned: int
    spill_dir: str

    @property
    def measured(self) -> list[str]:
        """The policies that can be."""
        return [key for key in self.policies if POLICIES[key].runs]


def run(
    json_path: Path | None = None,
    *,
    network: tuple[str, ...] = tuple(PRESETS["small"]),
    preset: str = "small",
    budgets: tuple[str, ...] = BUDGETS,
    policies: tuple[str, ...] = tuple(POLICIES),
    steps: int = 6,
    repeat: int = 1,
    slowest: float = 60.0,
    learned: int = 32,
    calibration: Path | None = None,
    page: Path | None = None,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Measure and simulate every policy under every budget.

    Args:
        json_path: where the numbers so far are written after each budget; the figure beside it.
        network: networks of the zoo; there are no others than by default.
        preset: of all of them: tiny or small.
        budgets: shares of parameters, gradients, optimizer state and what a step saves, as ``1/4``.
        policies: of which the last three are simulated only; there are no others than by default.
        steps: of each run that count, three to a turn, at least 5. From the eleventh step on a
            session may try to do without prefetch, which is not simulated; 6 are ten in all.
        repeat: runs of each.
        slowest: times what a plain step takes, at which a policy is stopped; never below 10 s.
        learned: recorded steps that the pilot learns from.
        calibration: what ``experiment simulation --json`` wrote on this machine, for what the
            runtime takes itself; without it that is as shipped.
        page: where a page with the table and the figure is written.
        spill_dir: where spill and swap files lie.

    Raises:
        ConfigError: an option names nothing that there is, or a number is too small.
        WorkerError: plain training failed.
    """
    if page is not None:
        make_room(page, "--page")
    specs = _networks(network, preset)
    asked = _Asked(
        _policies(policies),
        _budgets(budgets),
        Turns(-(-steps // Turns.per_turn), slowest=slowest),
        repeat,
        learned,
        str(spill_dir or default_spill_dir()),
    )
    for name, value, least in (
        ("steps", steps, _LEAST_STEPS),
        ("repeat", repeat, 1),
        ("learned", learned, 2),
    ):
        if value < least:
            raise ConfigError(f"{name}={value} is too few: take at least {least}")
    if slowest <= 1:
        raise ConfigError(f"slowest={slowest} stops every policy: take a factor above 1")
    result: dict[str, Any] = {
        "preset": preset,
        "steps": len(asked.turns.counted),
        "repeat": repeat,
        "warmup": asked.turns.warmup,
        "slowest": slowest,
        "learned": learned,
        "calibration": None if calibration is None else str(calibration),
        "published": FASTER,
        "policies": {key: one for key, one in described().items() if key in asked.policies},
        "networks": {},
        "rows": [],
    }
    with progress_bar(True) as report, tempfile.TemporaryDirectory() as folder:
        fit = _fit(calibration, asked.spill_dir, report)
        result |= {
            "link": asdict(fit.machine.link),
            "interference": fit.machine.interference,
            "work": asdict(fit.work),
            "pace_s": fit.pace_s,
        }
        for name, spec in specs.items():
            found = _compare(name, spec, asked, fit, Path(folder), report)
            for described_as, rows in found:
                result["networks"][name] = described_as
                result["rows"] += rows
                result["summary"] = summary(result["rows"])
                if json_path is not None:
                    write_json(json_path, result)
    _present(result, json_path, page)
    return result


def _fit(calibration: Path | None, spill_dir: str, report: Report) -> Fit:
    import torch

    from dynoffload.estimation import Calibration

    report("the link", 0, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)  # a pace is that of so many, as what is measured beside it is
    try:
        known = Calibration.of(spill_dir, calibration)
    finally:
        torch.set_num_threads(threads)
    return Fit(known.machine, known.work, known.pace_s)


def _present(result: Mapping[str, Any], json_path: Path | None, page: Path | None) -> None:
    from dynoffload.experiments.step_time_views import page_of, show, write_figure

    show(result)
    beside = json_path or page
    if beside is not None:
        write_figure(result, beside.with_suffix(".svg"))
    if page is not None and beside is not None:
        figure = beside.with_suffix(".svg")
        near = figure.name if figure.parent.resolve() == page.parent.resolve() else str(figure)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(page_of(result, near), encoding="utf-8")


# What is asked


def _networks(names: Sequence[str], preset: str) -> dict[str, Spec]:
    if preset not in PRESETS:
        raise ConfigError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    known = PRESETS[preset]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        named = ", ".join(map(repr, unknown)) or "nothing"
        raise ConfigError(f"network names {named}; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def _policies(names: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        named = ", ".join(map(repr, unknown)) or "nothing"
        raise ConfigError(f"policies names {named}; there are {', '.join(POLICIES)}")
    return tuple(key for key in POLICIES if key in names)


def _budgets(texts: Sequence[str]) -> tuple[Fraction, ...]:
    found = []
    for text in texts:
        try:
            share = Fraction(text)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if share <= 0:
            raise ConfigError(f"{text!r} in budgets is no share above 0: write 1/4, or 0.25")
        found.append(share)
    if not found:
        raise ConfigError("there are no budgets: give shares such as 1,1/2,1/4")
    return tuple(sorted(set(found), reverse=True))


# One network


def _compare(
    name: str, spec: Spec, asked: _Asked, fit: Fit, folder: Path, report: Report
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield what is known of a network, and its rows, budget by budget."""
    from dynoffload.profiler import load_trace, trace_files

    spec = replace(spec, split="held-out", threads=_THREADS, spill_dir=asked.spill_dir)
    zoo = {key: getattr(spec, key) for key in ("network", "preset", "sizes", "shape")}
    known = material(
        name,
        asked.turns.steps,
        folder,
        report,
        learn=PILOT in asked.policies,
        zoo=zoo,
        learned=asked.learned,
    )
    traces = [load_trace(path) for path in trace_files(folder / name / TRACES)]
    work = replayed(known, traces)
    plain = tuple(sum(known.steps[number].seconds) for number in asked.turns.counted)
    pilot = folder / name / PILOT_NAME
    about = {
        **zoo,
        "footprint_bytes": known.footprint,
        "operators": len(traces[-1].operators),
        "plain_s": median(plain),
    }
    total = len(asked.budgets) * asked.repeat * (1 + len(asked.measured)) * asked.turns.steps
    done = 0
    for share in asked.budgets:
        budget = int(share * known.footprint)

        def tell(policy: str, share: Fraction = share) -> None:
            nonlocal done
            done += 1
            report(f"{name}, {share}: {policy}", min(done, total), total)

        runs = [
            measure(
                spec, asked.measured, budget, asked.turns, pilot, tell, footprint=known.footprint
            )
            for _ in range(asked.repeat)
        ]
        beside = tuple(second for seconds, _ in runs for second in seconds)
        rows = [plain_row(name, share, budget, beside, plain)]
        for key in asked.policies:
            report(f"{name}, {share}: {key}, simulated", min(done, total), total)
            own = merged([found[key] for _, found in runs]) if POLICIES[key].runs else None
            sizing, refused = _division(runs, key)
            other = simulated(
                key,
                known,
                work,
                budget,
                sizing,
                refused,
                fit,
                asked.turns.counted,
                max(LEAST_S, asked.turns.slowest * median(plain)),
            )
            rows.append(row_of(name, key, share, budget, own, other, beside, plain))
        yield about, rows


def _division(
    runs: Sequence[tuple[Sequence[float], Mapping[str, Measured]]], key: str
) -> tuple[Mapping[str, int] | None, str]:
    """Return how the runtime divides the budget under a policy, and why it does not; what is not
    measured has the division of what is."""
    found = runs[0][1]
    own = found.get(key)
    if own is None and POLICIES[key].strategy is None:
        own = next((one for one in found.values() if one.sizing is not None), None)
    if own is None:
        return None, _ALL_REFUSED if found else _UNDIVIDED
    return own.sizing, own.side.why
