"""What a prediction is worth: waiting, waste and time in real runs at an eighth of the footprint.

What it is: dynamic networks trained on files that their pilot has not seen, plain and under one
eighth of what they take (more where one update alone takes more), on demand, by the order recorded
first, by the last order, by the pilot, and by a clairvoyant that knows what will run, in processes
that take turns on the same samples. The first steps, in which a session that waits long tries
whether prefetch pays (`dynoffload.runtime.migration.gates`), are not measured; in how many of those
that are nothing was fetched ahead is told.

What it is not: the pilot's score, which `dynoffload.experiments.pilot_accuracy` takes.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.experiments import make_room
from dynoffload.experiments.baselines import REPLAY
from dynoffload.experiments.harness import turns
from dynoffload.experiments.pilot_accuracy import recorded
from dynoffload.experiments.pilot_benefit_views import show, write_figure, write_page
from dynoffload.experiments.pilot_cases import Case
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import (
    Worker,
    losses_equal,
    mean_accuracy,
    median_seconds,
    median_stat,
    worker,
)
from dynoffload.pilot.progress import Report, progress_bar
from dynoffload.runtime.migration.gates import SETTLING, TRIED, WATCHED

_LEAD = 1


@dataclass(frozen=True)
class Policy:
    """One way to prefetch: options of the session, or a baseline, and what steers."""

    config: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""
    piloted: bool = False
    clairvoyant: bool = False


POLICIES: dict[str, Policy] = {
    "on_demand": Policy({"policy": "on-demand"}),
    "recorded": Policy(baseline=REPLAY),
    "repeat": Policy({"policy": "repeat"}),
    "pilot": Policy({"policy": "pilot"}, piloted=True),
    "clairvoyant": Policy({"policy": "pilot"}, clairvoyant=True),
}
"""By the key of the JSON."""

WARMUP = SETTLING + WATCHED + SETTLING + TRIED + SETTLING
"""Steps until the first trial of prefetch is over, if there is one."""
SHARE = 0.125
"""Of the footprint, that a budget is."""


def cases(size: str) -> dict[str, tuple[Case, float, int]]:
    """Return the cases by key, each with its least share of the footprint, and its threads.

    oneDNN's convolutions with several threads are not the same from one run of plain PyTorch to the
    next, so nothing could be compared with them: networks of convolutions get one thread.

    Args:
        size: preset of the networks: ``tiny`` or ``small``.
    """
    found = (
        (Case("moe_8", "moe", f"{size}-wide", {"length": 8}, "top-2 of 64, 8 tokens"), SHARE, 0),
        (Case("moe_64", "moe", f"{size}-wide", {"length": 64}, "top-2 of 64, 64 tokens"), SHARE, 0),
        (Case("switch", "switch", size, {"length": 64}, "Switch, 32 experts, 64 tokens"), SHARE, 0),
        (Case("depths", "depths", size, {"length": 16}, "mixture of depths, 16 tokens"), SHARE, 0),
        (Case("tree_cnn", "tree-cnn", size, title="tree CNN"), SHARE, 0),
        (Case("slim", "slim", size, title="slimmable, 4 widths"), 0.2, 1),
        (Case("gan", "gan", size, title="unrolled GAN"), 0.2, 0),
        (Case("tree", "tree", size, title="Child-Sum Tree-LSTM"), 0.5, 0),
    )
    return {case.key: (case, share, threads) for case, share, threads in found}


def run(
    json_path: Path | None = None,
    *,
    only: tuple[str, ...] = (),
    size: str = "small",
    samples: int = 240,
    steps: int = 24,
    warmup: int = WARMUP,
    per_turn: int = 4,
    share: float = SHARE,
    lr: float = 3e-4,
    model: str = "lightgbm",
    page: Path | None = None,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Record, train the pilots, and run each case.

    Args:
        json_path: the figure is written beside it.
        only: which cases; without it all.
        size: preset of the networks: ``tiny`` or ``small``.
        samples: recorded steps that a pilot learns from.
        steps: measured steps of each run, at least.
        warmup: steps before them.
        per_turn: measured steps of a turn.
        share: of the footprint that a budget is, at least; some networks take more.
        lr: learning rate.
        model: kind of pilot.
        page: a Markdown file to write.
        spill_dir: where the spill files lie.

    Raises:
        ConfigError: there is no such case.
    """
    known = cases(size)
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"no case is named {unknown}; there are {', '.join(known)}")
    if page is not None:
        make_room(page, "--page")
    told = {"size": size, "samples": samples, "model": model, "steps": steps, "warmup": warmup}
    result: dict[str, Any] = {**told, "only": list(only), "cases": {}}
    with progress_bar(True) as report:
        for case, least, threads in (known[name] for name in only or known):
            part = max(share, least)
            with contextlib.ExitStack() as stack:
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                pilot = scratch / "case.pilot"
                footprint_bytes = _prepare(case, samples, lr, model, pilot, report)
                spec = Spec(
                    case.network,
                    case.preset,
                    shape=case.shape,
                    split="held-out",
                    data_seed=1,
                    lr=lr,
                    budget=int(part * footprint_bytes),
                    threads=threads,
                    spill_dir=None if spill_dir is None else str(spill_dir),
                )
                rounds = -(-steps // per_turn)
                found = _compare(case, spec, pilot, warmup, rounds, per_turn, report)
                result["cases"][case.key] = {
                    "title": case.title,
                    "share": part,
                    "footprint_bytes": footprint_bytes,
                    "budget_bytes": spec.budget,
                    **found,
                }
    show(result)
    if json_path is not None:
        write_figure(result, json_path.with_suffix(".svg"))
    if page is not None:
        write_page(result, page, json_path)
    return result


def _prepare(case: Case, samples: int, lr: float, model: str, path: Path, report: Report) -> int:
    """Train a pilot into ``path`` and return the footprint of a step, the largest recorded."""
    from dynoffload.pilot.train import train_pilot
    from dynoffload.planning.footprint import footprint
    from dynoffload.profiler import load_trace, trace_files

    with recorded(case, samples, lr, report) as traces:
        report(f"{case.key}: learning a pilot")
        train_pilot(traces, model=model, progress=False).pilot.save(path)
        found = trace_files(traces)
        # The optimizer's state appears with a parameter's first gradient: late steps have most.
        return max(footprint(load_trace(trace)).total for trace in found[-32:])


@dataclass(frozen=True)
class _Run:
    """A worker that takes turns; before each step the clairvoyant is told what it will visit."""

    worker: Worker
    orders: Iterator[list[str]] | None = None

    def step(self, *, measured: bool = True) -> None:
        """Make one step."""
        order = () if self.orders is None else (json.dumps(next(self.orders)),)
        self.worker.step(*order, measured=measured)


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
    orders, watched = _looked_ahead(case, spec, each, report)
    with contextlib.ExitStack() as stack:
        report(f"{case.key}: starting", 0, None)

        def started(key: str, policy: Policy) -> _Run:
            own = replace(
                spec,
                mode=BUDGETED,
                config=policy.config,
                baseline=policy.baseline,
                pilot=str(pilot) if policy.piloted else None,
                clairvoyant=policy.clairvoyant,
            )
            one = stack.enter_context(worker(key, own))
            return _Run(one, iter(orders) if policy.clairvoyant else None)

        plain = _Run(stack.enter_context(worker("plain", spec)))
        runs = {key: started(key, policy) for key, policy in POLICIES.items()}
        total = (1 + len(runs)) * each
        done = 0

        def tell(stepped: _Run) -> None:
            nonlocal done
            done += 1
            report(f"{case.key}: {stepped.worker.name}", done, total)

        for run, measured in turns(
            [plain, *runs.values()],
            warmup=warmup,
            rounds=rounds,
            per_turn=per_turn,
            lead=_LEAD,
        ):
            run.step(measured=measured)
            tell(run)
        numbers: dict[str, Any] = {"plain": {"step_s": median_seconds(plain.worker.measured)}}
        for key, ran in runs.items():
            numbers[key] = _numbers(plain.worker, ran.worker)
        return {
            "paths": len({tuple(order) for order in orders}),
            "steps": each,
            "largest_update_bytes": _largest_update(case, orders),
            "repeatable": losses_equal(plain.worker, watched),
            "runs": numbers,
        }


def _largest_update(case: Case, orders: Iterable[Iterable[str]]) -> int:
    """Return what the largest update of one visited module uses at once, in bytes: weights,
    gradients and the two moments of AdamW."""
    from dynoffload.experiments import zoo

    modules = dict(zoo.build(case.network, case.preset, device="meta").named_modules())
    visited = {path for order in orders for path in order}
    weights = (modules[path].parameters(recurse=False) for path in visited)
    return 4 * max(sum(int(p.nbytes) for p in own) for own in weights)


def _looked_ahead(
    case: Case, spec: Spec, steps: int, report: Report
) -> tuple[list[list[str]], Worker]:
    """Return what each step visits, and the plain run that told, of which no time is taken."""
    orders = []
    with worker("watched", replace(spec, watched=True)) as watched:
        for number in range(steps):
            report(f"{case.key}: looking ahead", number, steps)
            orders.append(watched.step()["visited"])
    return orders, watched


def _numbers(plain: Worker, ran: Worker) -> dict[str, Any]:
    steps = ran.measured
    return {
        "step_s": median_seconds(steps),
        "each_step_s": [step.seconds for step in steps],
        "each_prefetched": [step.stats["prefetched_bytes"] for step in steps],
        "stall_s": median_stat(steps, "stall_s"),
        "stall_total_s": sum(step.stats["stall_s"] for step in steps),
        "stalls": median_stat(steps, "stalls"),
        "bytes_in": int(median_stat(steps, "bytes_in")),
        "bytes_out": int(median_stat(steps, "bytes_out")),
        "prefetched_bytes": sum(step.stats["prefetched_bytes"] for step in steps),
        "wasted_bytes": sum(step.stats["wasted_bytes"] for step in steps),
        "steps_on_demand": sum(not step.stats["prefetched_bytes"] for step in steps),
        "accuracy": mean_accuracy(steps),
        "peak_fast_bytes": ran.ask("state")["peak_fast_bytes"],
        "losses_equal": losses_equal(plain, ran),
        "steps": len(steps),
    }
