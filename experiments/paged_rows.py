"""The rows of the paging benchmark: a plain run, variants under a budget beside it, and swap.

Headroom is declared before a variant runs within its limit: what a first run of the same kind took
beyond what it had before and its budget, in a cgroup that only counts, and a margin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from dynoffload.doctor import Tiers
from dynoffload.errors import ConfigError
from dynoffload.experiments.baselines import DTR, REPLAY
from dynoffload.experiments.baselines.cgroup import MemoryGroup, memory_group, swap_file
from dynoffload.experiments.bound import StepString, StepVisit, step_bound, step_string
from dynoffload.experiments.harness import turns
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import (
    Step,
    Worker,
    WorkerError,
    losses_equal,
    mean_accuracy,
    median_seconds,
    median_stat,
    worker,
)
from dynoffload.experiments.zoo import FUSED
from dynoffload.memory.limits import available_bytes
from dynoffload.pilot.progress import Report
from dynoffload.simulation.machine import Link
from dynoffload.units import MiB, format_bytes, format_seconds

_ROW_LENGTH = 256  # tokens of one sequence; a step has as many rows as its tokens make
_MARGIN = 1.2  # by which headroom is declared larger than it was measured
_BYTES_PER_PARAMETER = 16  # parameter, gradient and two tensors of state in fp32
_SPARE = 1.35  # what plain training takes beyond those: activations, temporaries, libraries


@dataclass(frozen=True)
class Variant:
    """One way of running (b).

    Attributes:
        key: where its numbers stand in the JSON; "" is the top level.
        optimizer: see `Spec`.
        tokens: tokens per step as a share of the experiment's.
        config: options of `dynoffload.OffloadConfig`.
        baseline: see `Spec`.
        pilot: see `Spec`.
        network: see `Spec`.
    """

    key: str
    optimizer: str = "fused"
    tokens: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""
    pilot: str | None = "auto"
    network: str = "moe"

    @property
    def group(self) -> tuple[str, str, float]:
        """What it shares with the variants that one plain run stands beside."""
        return (self.network, self.optimizer, self.tokens)


MAIN = "main"
VARIANTS: dict[str, Variant] = {
    MAIN: Variant(""),
    "mapped": Variant("mapped", config={"backend": "mapped"}),
    "repeat": Variant("repeat", config={"policy": "repeat"}, pilot=None),
    "on_demand": Variant("on_demand", config={"policy": "on-demand"}, pilot=None),
    "replay": Variant("replay", baseline=REPLAY, pilot=None),
    "dtr": Variant("dtr", baseline=DTR, pilot=None),
    "rollback": Variant("rollback", config={"rollback": True}),
    "foreach": Variant("foreach", optimizer="foreach"),
    "tokens_512": Variant("tokens_512", tokens=0.5),
    "fused": Variant("fused", network=FUSED),
}
"""By the name that ``--rows`` takes."""
ROWS = tuple(row for row in VARIANTS if row != DTR)
"""Those that are measured if none is named. DTR moves nothing, so it may refuse the budget, which
is its row then."""


@dataclass(frozen=True)
class Plan:
    """What one call of `run` measures."""

    preset: str
    tokens: int
    budget: int
    limit: int
    warmup: int
    rounds: int
    per_turn: int
    lead: int
    profile_steps: int
    paged_steps: int
    limited: bool
    spill_dir: Path

    def spec(self, variant: Variant) -> Spec:
        """Return what plain training of ``variant``'s kind runs."""
        tokens = int(self.tokens * variant.tokens)
        length = min(_ROW_LENGTH, tokens)
        return Spec(
            variant.network,
            self.preset,
            shape={"rows": max(1, tokens // length), "length": length},
            optimizer=variant.optimizer,
        )

    def budgeted(self, variant: Variant) -> Spec:
        """Return what (b) runs."""
        return replace(
            self.spec(variant),
            mode=BUDGETED,
            budget=self.budget,
            config=variant.config,
            baseline=variant.baseline,
            pilot=variant.pilot,
            meta=variant.baseline != DTR,  # which counts what is there as it begins
            spill_dir=str(self.spill_dir),
        )

    @property
    def turns(self) -> int:
        """Steps that each worker makes in an alternation."""
        return self.warmup + self.rounds * (self.lead + self.per_turn)


def measure_group(
    plan: Plan, variants: Sequence[Variant], tiers: Tiers, report: Report
) -> Iterator[tuple[Variant, dict[str, Any]]]:
    """Yield the numbers of variants that share their plain run; of DTR also why it is refused."""
    declared, refused = {}, {}
    for variant in variants:
        try:
            declared[variant.key] = _headroom(plan, variant, report)
        except WorkerError as error:
            if variant.baseline != DTR:
                raise
            refused[variant.key] = str(error).strip().splitlines()[-1]
    for variant in variants:
        if variant.key in refused:
            yield variant, {"infeasible": refused[variant.key], "budget_bytes": plan.budget}
    variants = [variant for variant in variants if variant.key not in refused]
    if not variants:
        return
    spec = plan.spec(variants[0])
    _require_memory(plan, len(variants))
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(worker("plain", spec))
        report("plain: building", 0, None)
        described = plain.step(measured=False, do="describe")
        string = _string_of(described)
        workers: dict[str, tuple[Worker, MemoryGroup | None]] = {}
        for variant in variants:
            name = variant.key or MAIN
            group = stack.enter_context(_group(plan))
            report(f"{name}: giving weights", 0, None)
            started = stack.enter_context(worker(name, plan.budgeted(variant), group))
            started.step(measured=False)
            workers[variant.key] = (started, group)
        total = plan.turns * (len(variants) + 1)
        done = 0

        def tell(stepped: Worker) -> None:
            nonlocal done
            done += 1
            last = format_seconds(stepped.steps[-1].seconds)
            report(f"{spec.optimizer}: {stepped.name} {last}", done, total)

        everyone = [plain, *(started for started, _ in workers.values())]
        for each, measured in turns(
            everyone,
            warmup=plan.warmup,
            rounds=plan.rounds,
            per_turn=plan.per_turn,
            lead=plan.lead,
        ):
            each.step(measured=measured)
            tell(each)
        rows = {
            variant.key: _row(plan, plain, *workers[variant.key], declared[variant.key])
            | _bound(plan, plain, workers[variant.key][0], string, tiers)
            for variant in variants
        }
        plain_peak = plain.ask("state")["peak_rss_bytes"]
    paged = _paged(plan, spec, plain, plain_peak, report)
    for variant in variants:
        row = rows[variant.key] | paged
        if paged["paged_s"] is not None:
            row["paged_over_offload"] = paged["paged_s"] / row["offload_s"]
        yield variant, row


@contextlib.contextmanager
def _group(plan: Plan) -> Iterator[MemoryGroup | None]:
    """Yield the cgroup of a (b), or None where they were given up."""
    if not plan.limited:
        yield None
        return
    with memory_group(plan.limit) as group:
        yield group


def _headroom(plan: Plan, variant: Variant, report: Report) -> int:
    """Run a variant without a limit, and return and print the headroom that is declared for it."""
    name = variant.key or MAIN
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(memory_group(None)) if plan.limited else None
        measured = stack.enter_context(worker(name, plan.budgeted(variant), group))
        for number in range(plan.profile_steps):
            report(f"{name}: measuring headroom", number, plan.profile_steps)
            measured.step(measured=False)
        if group is None:
            taken = int(measured.ask("state")["headroom_bytes"])
        else:
            before = measured.before["charged_bytes"]
            taken = group.usage().peak_bytes - before - plan.budget
    declared = -(-int(max(0, taken) * _MARGIN) // MiB) * MiB
    say(
        f"{name}: headroom declared {format_bytes(declared)}, measured {format_bytes(taken)} "
        f"without a limit; budget {format_bytes(plan.budget)}"
    )
    return declared


def _row(
    plan: Plan, plain: Worker, offload: Worker, group: MemoryGroup | None, headroom: int
) -> dict[str, Any]:
    """Return the numbers of one (b) beside (a)."""
    usage = group.usage() if group is not None else None
    state = offload.ask("state")
    steps, beside = offload.measured, plain.measured
    before = offload.before["charged_bytes" if group is not None else "rss_bytes"]
    seconds, in_memory = median_seconds(steps), median_seconds(beside)
    allowed = before + plan.budget + headroom
    return {
        "in_memory_s": in_memory,
        "offload_s": seconds,
        "paged_s": None,
        "offload_over_in_memory": seconds / in_memory,
        "paged_over_offload": None,
        "losses_equal": losses_equal(plain, offload),
        "backend": state["backend"],
        "budget_bytes": plan.budget,
        "headroom_bytes": headroom,
        "limit_bytes": plan.limit if group is not None else None,
        "process_before_bytes": before,
        "process_before_rss_bytes": offload.before["rss_bytes"],
        "cgroup_peak_bytes": usage.peak_bytes if usage else None,
        "cgroup_within_declared": usage.peak_bytes <= allowed if usage else None,
        "cgroup_limit_hits": usage.limit_hits if usage else None,
        "oom_kills": usage.oom_kills if usage else None,
        "peak_fast_bytes": state["peak_fast_bytes"],
        "within_budget": state["peak_fast_bytes"] <= plan.budget,
        "stall_s": median_stat(steps, "stall_s"),
        "bytes_in": int(median_stat(steps, "bytes_in")),
        "bytes_out": int(median_stat(steps, "bytes_out")),
        "wasted_bytes": int(median_stat(steps, "wasted_bytes")),
        "accuracy": mean_accuracy(steps),
        "in_memory_phases_s": _phases(beside),
        "offload_phases_s": _phases(steps),
        "in_memory_steps_s": [step.seconds for step in beside],
        "offload_steps_s": [step.seconds for step in steps],
    }


def _bound(
    plan: Plan, plain: Worker, offload: Worker, string: StepString, tiers: Tiers
) -> dict[str, Any]:
    """Return the bound of one (b), and how far it is from it."""
    phases = _phases(plain.measured)
    least = step_bound(
        string,
        plan.budget,
        Link(tiers.read_bps, tiers.write_bps, tiers.mixed_bps),
        phases["forward"] + phases["optimizer"],
        phases["backward"],
    )
    return {
        "bound_s": least.seconds,
        "bound_overlapped_s": least.overlapped_s,
        "bound_spread_s": least.spread_s,
        "offload_over_bound": median_seconds(offload.measured) / least.seconds,
        "offload_over_spread": median_seconds(offload.measured) / least.spread_s,
        "bound_phases": {
            "forward_and_optimizer": asdict(least.forward),
            "backward": asdict(least.backward),
        },
    }


def _phases(steps: Sequence[Step]) -> dict[str, float]:
    """Return the median seconds of each phase."""
    return {
        "forward": median(step.forward_s for step in steps),
        "backward": median(step.backward_s for step in steps),
        "optimizer": median(step.optimizer_s for step in steps),
    }


def _string_of(described: dict[str, Any]) -> StepString:
    visits = [StepVisit(tuple(names), saved) for names, saved in described["visits"]]
    return step_string(visits, described["parameters"])


# The system's own paging


def _paged(
    plan: Plan, spec: Spec, plain: Worker, plain_peak: int, report: Report
) -> dict[str, Any]:
    """Run (c): plain training within the limit, with a swap file for the rest."""
    nothing: dict[str, Any] = {"paged_s": None}
    if not plan.paged_steps:
        return nothing
    # Pages are kept in swap after they were read back; room for all of the process, and more.
    need = int(plain_peak * _SPARE)
    label = f"{spec.optimizer}: by the system's paging"
    with swap_file(plan.spill_dir, need), memory_group(plan.limit, swap=True) as group:
        with worker("paged", spec, group) as paged:
            total = plan.paged_steps + 1
            report(label, 0, total)
            for number in range(total):
                paged.step(measured=number > 0)
                last = format_seconds(paged.steps[-1].seconds)
                report(f"{label} {last}", number + 1, total)
            return {
                "paged_s": median_seconds(paged.measured),
                "paged_steps_s": [step.seconds for step in paged.measured],
                "paged_losses_equal": losses_equal(plain, paged),
                "paged_cgroup_peak_bytes": group.usage().peak_bytes,
                "swap_file_bytes": need,
            }


def _require_memory(plan: Plan, variants: int) -> None:
    """Refuse to start what would itself be paged, or killed."""
    from dynoffload.experiments import zoo

    parameters = sum(p.numel() for p in zoo.build("moe", plan.preset, device="meta").parameters())
    plain = int(parameters * _BYTES_PER_PARAMETER * _SPARE)
    need, have = plain + variants * plan.limit, available_bytes()
    if have < need:
        raise ConfigError(
            f"plain training and {variants} runs under a budget side by side need about "
            f"{format_bytes(need)}, and {format_bytes(have)} are available: free some memory, or "
            "measure fewer --rows at a time"
        )


def say(line: str) -> None:
    """Print a line beside the results."""
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
