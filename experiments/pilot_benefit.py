"""What a prediction is worth: waiting and waste in real runs at a share of the footprint.

What it is: dynamic networks trained on files that their pilot has not seen, plain and under one
eighth of what they take (one half for the Tree-LSTM, whose largest update is a third), on demand,
by the order recorded first, by the last order, by the pilot, and by a clairvoyant that knows what
will run, in processes that take turns on the same samples.

What it is not: the pilot's score, which `dynoffload.experiments.pilot_accuracy` takes.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynoffload.experiments.pilot_accuracy import Case, chosen_cases, recorded
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import (
    Worker,
    alternate,
    losses_equal,
    mean_accuracy,
    median_seconds,
    median_stat,
    worker,
)
from dynoffload.pilot.progress import Report, progress_bar
from dynoffload.units import format_bytes, format_seconds

_LEAD = 1


@dataclass(frozen=True)
class Policy:
    """One way to prefetch: options of the session, and whether the trained pilot steers."""

    config: dict[str, Any] = field(default_factory=dict)
    piloted: bool = False
    clairvoyant: bool = False


POLICIES: dict[str, Policy] = {
    "on_demand": Policy({"policy": "on-demand"}),
    "recorded": Policy({"policy": "replay"}),
    "repeat": Policy({"policy": "repeat"}),
    "pilot": Policy({"policy": "pilot"}, piloted=True),
    "clairvoyant": Policy({"policy": "pilot"}, clairvoyant=True),
}
"""By the key of the JSON."""


def run(
    json_path: Path | None = None,
    *,
    only: tuple[str, ...] = ("tree", "moe_8", "moe_64"),
    size: str = "small",
    samples: int = 320,
    steps: int = 40,
    warmup: int = 6,
    per_turn: int = 4,
    share: float = 0.125,
    tree_share: float = 0.5,
    lr: float = 3e-4,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Record, train the pilots, and run each case.

    Args:
        json_path: not used; the numbers are written by the caller.
        only: which cases.
        size: preset of the networks: ``tiny`` or ``small``.
        samples: recorded steps that a pilot learns from.
        steps: measured steps of each run, at least.
        warmup: steps before them.
        per_turn: measured steps of a turn.
        share: of the footprint that the budget of an MoE is.
        tree_share: the same of the Tree-LSTM, whose largest update alone takes two fifths.
        lr: learning rate.
        spill_dir: where the spill files lie.
    """
    result: dict[str, Any] = {"size": size}
    with progress_bar(True) as report:
        for case in chosen_cases(size, only):
            part = tree_share if case.network == "tree" else share
            with contextlib.ExitStack() as stack:
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                footprint_bytes = _prepare(case, samples, lr, scratch / "case.pilot", report)
                spec = Spec(
                    case.network,
                    case.preset,
                    shape=case.shape,
                    split="held-out",
                    data_seed=1,
                    lr=lr,
                    budget=int(part * footprint_bytes),
                    spill_dir=None if spill_dir is None else str(spill_dir),
                )
                rounds = -(-steps // per_turn)
                result[case.key] = {
                    "share": part,
                    "footprint_bytes": footprint_bytes,
                    "budget_bytes": spec.budget,
                    **_compare(
                        case, spec, scratch / "case.pilot", warmup, rounds, per_turn, report
                    ),
                }
    _print(result, only)
    return result


def _prepare(case: Case, samples: int, lr: float, path: Path, report: Report) -> int:
    """Train a pilot into ``path`` and return the footprint of a step, the largest recorded."""
    from dynoffload.pilot.train import train_pilot
    from dynoffload.planning.footprint import footprint
    from dynoffload.profiler.trace import Trace

    with recorded(case, samples, lr, report) as traces:
        report(f"{case.key}: learning a pilot")
        train_pilot(traces, progress=False).pilot.save(path)
        found = sorted(traces.glob("*.parquet"))
        # The optimizer's state appears with a parameter's first gradient: late steps have most.
        return max(footprint(Trace.load(trace)).total for trace in found[-32:])


def _compare(
    case: Case,
    spec: Spec,
    pilot: Path,
    warmup: int,
    rounds: int,
    per_turn: int,
    report: Report,
) -> dict[str, Any]:
    """Return the numbers of all runs of one case."""
    each = warmup + rounds * (_LEAD + per_turn)
    orders = _orders(case, spec, each, report)
    with contextlib.ExitStack() as stack:
        report(f"{case.key}: starting", 0, None)
        plain = stack.enter_context(worker("plain", spec))
        runs = {
            key: _Run(
                stack.enter_context(
                    worker(
                        key,
                        replace(
                            spec,
                            mode=BUDGETED,
                            config=policy.config,
                            pilot=str(pilot) if policy.piloted else None,
                            clairvoyant=policy.clairvoyant,
                        ),
                    )
                ),
                iter(orders) if policy.clairvoyant else None,
            )
            for key, policy in POLICIES.items()
        }
        plain_run = _Run(plain)
        total = (1 + len(runs)) * each
        done = 0

        def tell(stepped: _Run) -> None:
            nonlocal done
            done += 1
            report(f"{case.key}: {stepped.worker.name}", done, total)

        alternate(
            [plain_run, *runs.values()],
            warmup=warmup,
            rounds=rounds,
            per_turn=per_turn,
            lead=_LEAD,
            on_step=tell,
        )
        numbers: dict[str, Any] = {"plain": {"step_s": median_seconds(plain.measured)}}
        for key, ran in runs.items():
            numbers[key] = _numbers(plain, ran.worker)
        return numbers


@dataclass(frozen=True)
class _Run:
    """A worker that takes turns; before each step the clairvoyant is told what it will visit."""

    worker: Worker
    orders: Iterator[list[str]] | None = None

    def step(self, *, measured: bool = True) -> None:
        do = "step" if self.orders is None else f"step {json.dumps(next(self.orders))}"
        self.worker.step(measured=measured, do=do)


def _orders(case: Case, spec: Spec, steps: int, report: Report) -> list[list[str]]:
    """Return what each step visits, from a plain run that nothing is measured of."""
    with worker("watched", replace(spec, watched=True)) as watched:
        orders = []
        for number in range(steps):
            report(f"{case.key}: looking ahead", number, steps)
            orders.append(watched.step()["visited"])
        return orders


def _numbers(plain: Worker, ran: Worker) -> dict[str, Any]:
    steps = ran.measured
    return {
        "step_s": median_seconds(steps),
        "stall_s": median_stat(steps, "stall_s"),
        "stall_total_s": sum(step.stats["stall_s"] for step in steps),
        "stalls": median_stat(steps, "stalls"),
        "bytes_in": int(median_stat(steps, "bytes_in")),
        "bytes_out": int(median_stat(steps, "bytes_out")),
        "prefetched_bytes": sum(step.stats["prefetched_bytes"] for step in steps),
        "wasted_bytes": sum(step.stats["wasted_bytes"] for step in steps),
        "accuracy": mean_accuracy(steps),
        "peak_fast_bytes": ran.ask("state")["peak_fast_bytes"],
        "losses_equal": losses_equal(plain, ran),
        "steps": len(steps),
    }


def _print(result: dict[str, Any], names: tuple[str, ...]) -> None:
    from rich.console import Console

    from dynoffload.reporting.tables import ComparisonRow, comparison_table

    for name in names:
        found = result[name]
        rows = [ComparisonRow("plain", found["plain"]["step_s"])]
        for key in POLICIES:
            numbers = found[key]
            fetched = numbers["prefetched_bytes"]
            rows.append(
                ComparisonRow(
                    key.replace("_", " "),
                    step_s=numbers["step_s"],
                    stall_s=numbers["stall_s"],
                    stalls=numbers["stalls"],
                    bytes_in=numbers["bytes_in"],
                    bytes_out=numbers["bytes_out"],
                    wasted_bytes=int(numbers["wasted_bytes"] / numbers["steps"]),
                    wasted_share=numbers["wasted_bytes"] / fetched if fetched else None,
                    accuracy=numbers["accuracy"],
                    peak_fast_bytes=numbers["peak_fast_bytes"],
                    losses_equal=numbers["losses_equal"],
                )
            )
        title = f"{name}: footprint {format_bytes(found['footprint_bytes'])}"
        budget = found["budget_bytes"]
        Console().print(comparison_table(rows, title=title, budget=budget, upright=True))
        waited = {key: format_seconds(found[key]["stall_total_s"]) for key in POLICIES}
        Console().print(f"waited in all: {waited}", highlight=False)
