"""Your recorded steps on a machine that you describe: which budget, tier or link hides transfers.

Runs traces of `dynoffload profile` on simulated machines, for budgets and tiers of a TOML file.
Operator times are the recorded ones divided by the machine's speedup, or follow the file's table
``[compute]``. Plans know every step; a pilot that errs stalls longer. All steps are run twice and
the second run is measured, so data that fits stays in memory after its first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, option
from dynoffload.pilot.progress import Report
from dynoffload.profiler import Trace, load_trace, load_traces, trace_files
from dynoffload.simulation import (
    Link,
    Machine,
    Simulation,
    Workload,
    load_costs,
    load_machines,
    simulate,
    workload,
)
from dynoffload.units import GiB, format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
"""Budgets, as shares of a step's peak with everything in memory."""
POLICIES = {"planned": True, "on demand": False}
FACTORS = 64.0
"""Range of the search for a link: a tier's bandwidth divided and multiplied by this."""
_PRECISION = 0.01  # relative, of a budget or of a bandwidth

EXAMPLE = {
    "host": Machine(Link(25e9, 25e9, 45e9, latency_s=1e-5, fault_s=3e-5), GiB, compute=40.0),
    "CXL": Machine(Link(50e9, 50e9, 90e9, latency_s=1e-6, fault_s=3e-5), GiB, compute=40.0),
    "NVMe": Machine(Link(6.5e9, 4.5e9, 8e9, latency_s=8e-5, fault_s=1e-4), GiB, compute=40.0),
}
"""An accelerator forty times as fast as the recording machine, with host memory over PCIe 4.0 x16,
CXL memory over PCIe 5.0 x16, and one NVMe drive; rounded typical figures, none of them measured."""


@dataclass(frozen=True)
class Params:
    """The traces, the machine and the limits."""

    traces: Path | None = option(
        None, "a directory of `dynoffload profile`; without it a mixture of experts is recorded"
    )
    machine: Path | None = option(
        None,
        "a TOML file of a machine and its tiers: docs/results/whatif.md shows one, and "
        "help(dynoffload.simulation.load_machines) and load_costs name all keys; without it an "
        "accelerator forty times as fast as where was recorded, over host, CXL and NVMe memory",
    )
    budget: str = option(
        "",
        "fast memory, for the question of the link; without it the machine's fast_bytes, or a "
        "quarter of what a step takes if no machine is given",
    )
    tolerance: float = option(
        0.01, "share of a step's work that may wait where it counts as hidden"
    )
    steps: int = option(4, "how many of the traces are run: the last, as the first are slow")
    preset: str = option("small", "of the mixture of experts, where no traces are given")
    tokens: int = option(256, "of its samples")

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} is too few: take at least 1")
        if not 0 < self.tolerance < 1:
            raise ConfigError(
                f"tolerance is {self.tolerance}: it is a share of a step, between 0 and 1"
            )


class WhatIf(Experiment[Params]):
    """A case is a tier; all have the same recorded steps."""

    parameters = Params
    resumes = False
    height = 3.6
    work: Workload
    recorded_s: float

    def cases(self) -> Mapping[str, Machine]:
        path, params = self.params.machine, self.params
        self.costs = None if path is None else load_costs(path)
        recorded = _traces(params.traces, params.steps, params.preset, params.tokens)
        self.recorded_s = sum(op.seconds for trace in recorded for op in trace.operators)
        self.work = workload(recorded, self.costs)
        self.whole = max(self.work.peak(step) for step in self.work.steps)
        return EXAMPLE if path is None else load_machines(path)

    def run(self, case: Machine) -> Row:
        twice = replace(self.work, steps=[*self.work.steps, *self.work.steps])
        asked = case.fast_bytes if self.params.machine is not None else self.whole // 4
        if self.params.budget:
            asked = parse_bytes(self.params.budget)
        return _tier(twice, case, self.whole, asked, self.params.tolerance, self.report)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {
            "steps": len(self.work.steps),
            "recorded_s": self.recorded_s,
            "modelled_s": None if self.costs is None else self.work.seconds,
            "step_bytes": self.whole,
            "state_bytes": sum(self.work.sizes[region] for region in self.work.persistent),
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        found, rows = result["summary"], result["rows"]
        whole, compute = format_bytes(found["step_bytes"]), _planned_in_memory(rows[0])["compute_s"]
        parts: list[Table | str] = [
            Table(row["case"], _heads(), list(_cells(row)), ()) for row in rows
        ]
        if found["modelled_s"] is not None:
            recorded, modelled = (format_seconds(found[k]) for k in ("recorded_s", "modelled_s"))
            parts.append(f"operators take {modelled} by [compute], {recorded} were recorded")
        parts.append(
            f"means of {found['steps']} recorded steps, of which one takes {whole} with everything "
            f"in memory, and computes for {format_seconds(compute)}; exposed is what a step waits "
            "for transfers, in shares of what it computes; planned knows every step, on demand "
            "fetches at first use"
        )
        for row in rows:
            said = answers(row["case"], row, self.params.tolerance)
            parts += [f"{row['case']}, {line}" for line in said]
        return parts

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        _draw(figure, color, {row["case"]: row for row in result["rows"]})


def _traces(directory: Path | None, steps: int, preset: str, tokens: int) -> list[Trace]:
    if directory is not None:
        return list(load_traces(trace_files(directory)[-steps:]))
    import torch

    from dynoffload.experiments import zoo
    from dynoffload.profiler import profile

    model = zoo.build("moe", preset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = list(islice(zoo.samples("moe", seed=0, rows=1, length=tokens), steps))
    with TemporaryDirectory() as folder:
        made = profile(model, samples, out=folder, optimizer=optimizer, progress=False)
        return [load_trace(path) for path in made]


def _tier(
    work: Workload, machine: Machine, whole: int, asked: int, tolerance: float, report: Report
) -> Row:
    """Return the results of one tier."""
    rows = []
    total = len(SHARES) * len(POLICIES) + 2
    for number, share in enumerate(SHARES):
        on = machine.with_fast(max(1, math.ceil(share * whole)))
        row: dict[str, Any] = {"share": share, "budget_bytes": on.fast_bytes}
        for place, (policy, planned) in enumerate(POLICIES.items()):
            report(policy, number * len(POLICIES) + place, total)
            row[policy] = _summary(simulate(work, on, planned=planned))
        rows.append(row)
    report("the least budget", total - 2, total)
    held = sum(work.sizes[region] for region in work.persistent)
    found: dict[str, Any] = {
        "budgets": rows,
        "least_budget_bytes": _least_budget(work, machine, whole, tolerance),
        "budget_bytes": asked,
        "holds_all": asked >= whole,
        "fits_below": machine.slow_bytes is None or held <= machine.slow_bytes,
    }
    report("the slowest link", total - 1, total)
    link, on = machine.link, machine.with_fast(asked)
    found["infeasible"] = _summary(simulate(work, on, planned=True)).get("infeasible", "")
    factor = None if found["infeasible"] else _slowest_link(work, on, tolerance)
    found["link_factor"] = factor
    found["read_bps"] = link.read_bps
    found["least_read_bps"] = None if factor is None else factor * link.read_bps
    return found


def _summary(found: Simulation) -> dict[str, Any]:
    if found.infeasible:
        return {"infeasible": found.infeasible}
    steps = found.steps[len(found.steps) // 2 :]  # the second run
    seconds = sum(step.seconds for step in steps) / len(steps)
    compute = sum(step.compute_s for step in steps) / len(steps)
    return {
        "seconds": seconds,
        "compute_s": compute,
        "exposed": seconds / compute - 1,
        "bytes_in": sum(step.bytes_in for step in steps) // len(steps),
        "bytes_out": sum(step.bytes_out for step in steps) // len(steps),
    }


def _hidden(work: Workload, machine: Machine, tolerance: float) -> bool:
    found = _summary(simulate(work, machine, planned=True))
    return bool(found.get("exposed", math.inf) <= tolerance)


def _least_budget(work: Workload, machine: Machine, whole: int, tolerance: float) -> int | None:
    """Return the least budget that hides transfers; None if even the whole peak does not."""
    enough, short = whole + 1, 0
    if not _hidden(work, machine.with_fast(enough), tolerance):
        return None
    while enough - short > _PRECISION * whole:
        middle = (enough + short) // 2
        if _hidden(work, machine.with_fast(max(1, middle)), tolerance):
            enough = middle
        else:
            short = middle
    return enough


def _slowest_link(work: Workload, machine: Machine, tolerance: float) -> float | None:
    """Return the least factor of the tier's bandwidths that hides transfers; None if above
    `FACTORS`."""

    def enough_at(factor: float) -> bool:
        return _hidden(work, replace(machine, link=machine.link.times(factor)), tolerance)

    enough, short = FACTORS, 1 / FACTORS
    if not enough_at(enough):
        return None
    if enough_at(short):
        return short
    while enough / short > 1 + _PRECISION:
        middle = math.sqrt(enough * short)
        if enough_at(middle):
            enough = middle
        else:
            short = middle
    return enough


def _heads() -> list[str]:
    return ["budget", "of it", *(head for policy in POLICIES for head in (policy, "exposed"))]


def _cells(tier: Mapping[str, Any]) -> Iterator[list[str]]:
    for row in tier["budgets"]:
        cells = [format_bytes(row["budget_bytes"]), f"{row['share']:.1%}"]
        for policy in POLICIES:
            one = row[policy]
            if "seconds" in one:
                cells += [format_seconds(one["seconds"]), f"{one['exposed']:.1%}"]
            else:
                cells += ["cannot run", ""]
        yield cells


def answers(name: str, tier: Mapping[str, Any], tolerance: float) -> list[str]:
    """Return the answers for one tier, as sentences."""
    hidden = f"no more than {tolerance:.0%} of a step waits"
    least, left = tier["least_budget_bytes"], _planned_in_memory(tier)["exposed"]
    said = [
        f"budget: from {format_bytes(least)} on {hidden}"
        if least is not None
        else f"budget: with everything in memory {left:.1%} of a step still waits, for what is new "
        f"in each: more than {tolerance:.0%} whatever the budget is"
    ]
    at, factor = format_bytes(tier["budget_bytes"]), tier["link_factor"]
    if tier["holds_all"]:
        said.append(f"link: {at} hold everything, so any will do")
    elif tier["infeasible"]:
        said.append(f"link: under {at} a step cannot run: {tier['infeasible']}")
    elif factor is not None and factor <= 1 / FACTORS:
        said.append(f"link: under {at} 1/{FACTORS:.0f} of its bandwidth is enough that {hidden}")
    elif factor is None:
        said.append(f"link: under {at} no link of up to {FACTORS:.0f} times its bandwidth does")
    else:
        said.append(
            f"link: under {at} {_gbps(tier['least_read_bps'])} are enough that {hidden}; {name} "
            f"reads {_gbps(tier['read_bps'])}"
        )
    if not tier["fits_below"]:
        said.append("capacity: parameters and optimizer state are more than this tier holds")
    return said


def _planned_in_memory(tier: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the planned result with everything in memory, which is always feasible."""
    planned: Mapping[str, Any] = tier["budgets"][0]["planned"]
    return planned


def _gbps(bps: float) -> str:
    return f"{bps / 1e9:,.0f} GB/s" if bps >= 1e11 else f"{bps / 1e9:.3g} GB/s"


def _draw(figure: Figure, color: Mapping[str, str], tiers: Mapping[str, Row]) -> None:
    every = figure.subplots(1, len(tiers), sharey=True, squeeze=False)[0]
    for axes, (name, tier) in zip(every, tiers.items(), strict=True):
        _draw_tier(axes, color, name, tier)
    every[0].set_ylabel("step, times its compute")
    every[0].legend(frameon=False)


def _draw_tier(axes: Axes, color: Mapping[str, str], name: str, tier: Mapping[str, Any]) -> None:
    for policy, shade in zip(POLICIES, ("plan", "fault"), strict=True):
        rows = [row for row in tier["budgets"] if "seconds" in row[policy]]
        xs = [row["share"] for row in rows]
        ys = [1 + row[policy]["exposed"] for row in rows]
        axes.plot(xs, ys, marker="o", markersize=4, color=color[shade], label=policy)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [2.0**-power for power in range(5)]
    axes.set_xticks(ticks, ["1", *(f"1/{2**power}" for power in range(1, 5))])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("budget, of what a step takes")
    axes.set_title(f"{name}, {tier['read_bps'] / 1e9:g} GB/s", loc="left")
