"""Real sessions of the ablation: stalls, waste and time of each way to predict, under a budget.

A network trains on files of its own plainly (twice, as a control), on demand, by the last order, by
the pilot that comes with the package, with and without routers, and with perfect predictions
("clairvoyant"). Their processes take turns on the same samples. The budget is an eighth of the
footprint, more where one update needs more. The first steps are not measured: in them a session
tests whether prefetch pays (`dynoffload.runtime.migration.gates`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dynoffload.experiments import zoo
from dynoffload.experiments.contest import (
    Contestant,
    Side,
    Step,
    Turns,
    Way,
    measure,
    median_seconds,
)
from dynoffload.experiments.harness import Row
from dynoffload.experiments.pilot_recording import Case, recorded
from dynoffload.experiments.processes import WorkerError
from dynoffload.experiments.ways import BUDGETED, PLAIN, Spec, adamw, network
from dynoffload.experiments.zoo.fused_moe import FAMILIES
from dynoffload.pilot.progress import Report
from dynoffload.runtime.migration.gates import SETTLING, TRIED, WATCHED
from dynoffload.units import KiB

SHARE = 0.125
"""Budget as a share of the footprint."""
WARMUP = SETTLING + WATCHED + SETTLING + TRIED + SETTLING
"""Steps until the first trial of prefetch is over, if there is one."""
CLAIRVOYANT, CONTROL = "clairvoyant", "plain again"
POLICIES: dict[str, dict[str, Any]] = {
    CONTROL: {"mode": PLAIN},
    "on demand": {"config": {"policy": "on-demand"}},
    "last order": {"config": {"policy": "repeat"}},
    "pilot": {"pilot": "auto"},
    "pilot, no routers": {"pilot": "auto", "config": {"routing_probes": ()}},
    CLAIRVOYANT: {"clairvoyant": True},
}
"""Way to predict -> options of `Spec`."""
_RECORDED = 8  # steps whose traces give the footprint
_TRAINED = 300  # steps before a mixture of transformers is paged, of 16 rows of 64 bytes
_PAGES = {"min_paged_bytes": 20 * KiB, "page_bytes": 8 * KiB}
"""Options by which experts of the mixtures are paged one by one, and routers stay."""


@dataclass(frozen=True)
class Contest:
    """A network whose ways take turns.

    Attributes:
        case: the network.
        share: least share of the footprint that the budget is.
        config: options of every session.
    """

    case: Case
    share: float = SHARE
    config: Mapping[str, Any] = field(default_factory=dict)


def networks(size: str) -> dict[str, tuple[Case, float]]:
    """Return the networks of the zoo by key, each with its least share of the footprint.

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


def contests(size: str) -> dict[str, Contest]:
    """Return the networks that train in sessions, by key."""
    found = {key: Contest(*of) for key, of in networks(size).items()}
    for family in FAMILIES:
        shape = {"rows": 1, "length": 16}
        case = Case(family, "fused", f"{family}-tiny", shape, f"{FAMILIES[family][0]}, 64 experts")
        found[family.replace("-", "_")] = Contest(case, config=_PAGES)
    return found


def train_in_turns(
    contest: Contest, seed: int, turns: Turns, spill_dir: Path | None, report: Report
) -> Row:
    """Train one network in all ways, and return what each took.

    Args:
        contest: the network.
        seed: of weights and samples.
        turns: number and order of the steps.
        spill_dir: where the spill files lie; None for the default.
        report: receives progress.
    """
    from dynoffload.planning.footprint import footprint
    from dynoffload.profiler import load_trace, trace_files

    case = contest.case
    where = None if spill_dir is None else str(spill_dir)
    spec = Spec(case.network, case.preset, shape=case.shape, lr=case.lr, seed=seed, data_seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        if case.network == zoo.FUSED:
            spec = _trained(spec, Path(folder), report)
        with recorded(spec, _RECORDED, report) as traces:
            most = max(footprint(load_trace(trace)) for trace in trace_files(traces))
        spec = replace(spec, spill_dir=where, split="held-out")
        orders, losses = plain_orders(spec, turns.steps, report)
        budget = int(contest.share * most)
        ways = {}
        for key, of in POLICIES.items():
            config = {**contest.config, **of.get("config", {})}
            budgeted = {"mode": BUDGETED, "budget": budget, **of, "config": config}
            run = spec if key == CONTROL else replace(spec, **budgeted)
            ways[key] = Way(run, orders=orders if key == CLAIRVOYANT else ())
        found = measure(spec, ways, turns, lambda key: report(f"{case.key}, {seed}: {key}"))
    return {
        "title": case.title,
        "seed": seed,
        "footprint_bytes": most,
        "budget_bytes": budget,
        "paths": len({tuple(order) for order in orders}),
        "repeatable": losses == found.plain_losses,
        "runs": {
            "plain": {"step_s": median_seconds(found.plain)},
            **{
                key: numbers(found.steps[key], found.every[key], found.sides[key])
                for key in POLICIES
            },
        },
    }


def _trained(spec: Spec, folder: Path, report: Report) -> Spec:
    """Train a mixture of transformers, and return it with the file of its weights."""
    from safetensors.torch import save_model

    model: Any = network(replace(spec, lr=2e-3))
    model.inner.set_experts_implementation("grouped_mm")  # several times as fast as eager
    optimizer = adamw(model, replace(spec, lr=2e-3))
    stream = zoo.samples(zoo.FUSED, seed=spec.data_seed, rows=16, length=64)
    for step, sample in enumerate(islice(stream, _TRAINED)):
        report(f"{spec.preset}: training", step, _TRAINED)
        sample.call(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = folder / "weights.safetensors"
    save_model(model, str(weights))
    return replace(spec, weights=str(weights))


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


def numbers(steps: Sequence[Step], every: Sequence[Step], side: Side) -> dict[str, Any]:
    """Return what a run's measured steps took, and what prediction took of all of them.

    Raises:
        WorkerError: it dropped out.
    """
    if side.why:
        raise WorkerError(side.why)

    def of(name: str) -> list[Any]:
        return [step.stats[name] for step in steps]

    def share(name: str) -> float:
        total = sum(step.seconds for step in every)  # without waiting for the others' turns
        return float(sum(step.stats[name] for step in every) / total)

    if not side.sizing:
        return {"step_s": side.seconds, "each_step_s": side.steps_s}
    known = [accuracy for accuracy in of("accuracy") if accuracy is not None]
    return {
        "step_s": side.seconds,
        "each_step_s": side.steps_s,
        "stall_s": side.stall_s,
        "stall_total_s": sum(of("stall_s")),
        "stalls": median(of("stalls")),
        "bytes_in": int(median(of("bytes_in"))),
        "bytes_out": int(median(of("bytes_out"))),
        "prefetched_bytes": sum(of("prefetched_bytes")),
        "wasted_bytes": sum(of("wasted_bytes")),
        "predicting_share": share("predicting_s"),
        "replanning_share": share("replanning_s"),
        "accuracy": fmean(known) if known else None,
        "peak_fast_bytes": side.peak_fast_bytes,
        "losses_equal": side.losses_equal,
        "steps": len(steps),
    }
