"""Training in a third of its memory: plain, under a budget in a cgroup, and by the system's swap.

What it is: the benchmark behind the project's main figures. One network is trained three ways, each
in a process of its own: (a) plain PyTorch with all the memory it wants; (b) dynoffload under
``budget`` in a cgroup of ``limit`` without swap, built on the meta device, so that it is never
whole in memory; (c) plain PyTorch in such a cgroup with a swap file. (a) and all variants of (b)
take turns on one machine; (c) runs after them, as nothing else could meanwhile. All make the same
steps on the same samples, and their losses are compared bit by bit.

What it is not: a judgement of other systems for offloading; (c) is what a machine does by itself.

Headroom is declared before (b) runs: what a first run of the same kind took beyond what it had
before and its budget, in a cgroup that only counts.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from dynoffload.doctor import Tiers, measure_tiers
from dynoffload.errors import ConfigError
from dynoffload.experiments import write_json
from dynoffload.experiments.cgroup import (
    LimitError,
    MemoryGroup,
    memory_group,
    swap_file,
    why_unavailable,
)
from dynoffload.experiments.optimum import Link, StepString, StepVisit, step_bound, step_string
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import (
    Step,
    Worker,
    alternate,
    losses_equal,
    mean_accuracy,
    median_seconds,
    median_stat,
    worker,
)
from dynoffload.memory.limits import available_bytes
from dynoffload.pilot.progress import Report, progress_bar
from dynoffload.units import MiB, format_bytes, format_seconds, parse_bytes

logger = logging.getLogger(__name__)

_ROW_LENGTH = 256  # tokens of one sequence; a step has as many rows as its tokens make
_MARGIN = 1.2  # by which headroom is declared larger than it was measured
_BYTES_PER_PARAMETER = 16  # parameter, gradient and two tensors of state in fp32
_SPARE = 1.35  # what plain training takes beyond those: activations, temporaries, libraries
_TIER_SECONDS = 0.5


@dataclass(frozen=True)
class Variant:
    """One way of running (b).

    Attributes:
        key: where its numbers stand in the JSON; "" is the top level.
        optimizer: see `Spec`.
        tokens: tokens per step as a share of the experiment's.
        config: options of `dynoffload.OffloadConfig`.
        pilot: see `Spec`.
    """

    key: str
    optimizer: str = "fused"
    tokens: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)
    pilot: str | None = "auto"

    @property
    def group(self) -> tuple[str, float]:
        """What it shares with the variants that one plain run stands beside."""
        return (self.optimizer, self.tokens)


MAIN = "main"
VARIANTS: dict[str, Variant] = {
    MAIN: Variant(""),
    "mapped": Variant("mapped", config={"backend": "mapped"}),
    "on_demand": Variant("on_demand", config={"policy": "on-demand"}, pilot=None),
    "foreach": Variant("foreach", optimizer="foreach"),
    "tokens_512": Variant("tokens_512", tokens=0.5),
}
"""By the name that ``--rows`` takes."""


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
            "moe",
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
            pilot=variant.pilot,
            meta=True,
            spill_dir=str(self.spill_dir),
        )

    @property
    def turns(self) -> int:
        """Steps that each worker makes in an alternation."""
        return self.warmup + self.rounds * (self.lead + self.per_turn)


def run(
    json_path: Path | None = None,
    *,
    rows: tuple[str, ...] = tuple(VARIANTS),
    preset: str = "base",
    tokens: int = 1024,
    budget: str = "1GB",
    limit: str = "2GB",
    steps: int = 6,
    warmup: int = 3,
    paged_steps: int = 5,
    profile_steps: int = 5,
    limited: bool = True,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Measure the rows asked for.

    Args:
        json_path: where the numbers so far are written after each row.
        rows: names of `VARIANTS`.
        preset: sizes of the MoE language model.
        tokens: per step.
        budget: of dynoffload.
        limit: of the cgroups of (b) and (c).
        steps: measured steps of (a) and (b), two per turn.
        warmup: steps before them.
        paged_steps: measured steps of (c), after one to warm up; 0 leaves (c) out.
        profile_steps: steps of the run that measures the headroom.
        limited: False measures (a) and (b) without cgroups, where those cannot be had.
        spill_dir: where the spill file and the swap file lie.

    Raises:
        ConfigError: a row does not exist, or a number of steps is too small.
        LimitError: cgroups or swap cannot be had here, and were not given up.
    """
    unknown = [row for row in rows if row not in VARIANTS]
    if unknown or not rows:
        raise ConfigError(f"no row is named {unknown}; there are {', '.join(VARIANTS)}")
    if steps < 1 or profile_steps < 1 or warmup < 1 or paged_steps < 0:
        raise ConfigError("steps, warmup and profile_steps are at least 1, paged_steps at least 0")
    if limited and (reason := why_unavailable(swap=paged_steps > 0)):
        raise LimitError(
            f"{reason}: neither dynoffload within a hard limit nor the system's paging can be "
            "measured. Run as root on a system with memory cgroups, or pass --limited false to "
            "measure the step times alone"
        )
    per_turn = min(2, steps)
    plan = Plan(
        preset=preset,
        tokens=tokens,
        budget=parse_bytes(budget),
        limit=parse_bytes(limit),
        warmup=warmup,
        rounds=-(-steps // per_turn),
        per_turn=per_turn,
        lead=1,
        profile_steps=profile_steps,
        paged_steps=paged_steps if limited else 0,
        limited=limited,
        spill_dir=spill_dir or Path(tempfile.gettempdir()),
    )
    chosen = [VARIANTS[row] for row in VARIANTS if row in rows]
    result: dict[str, Any] = {}
    with progress_bar(True) as report:
        report("bandwidth of the tiers")
        tiers = measure_tiers(plan.spill_dir, _TIER_SECONDS)
        for group in dict.fromkeys(variant.group for variant in chosen):
            members = [variant for variant in chosen if variant.group == group]
            for variant, row in _measure_group(plan, members, tiers, report):
                if variant.key:
                    result[variant.key] = row
                else:
                    result = {**row, **result}
                if json_path is not None:
                    write_json(json_path, result)
    result |= {"preset": plan.preset, "tokens": plan.tokens, "tiers": _tiers_json(tiers)}
    _print(result, chosen)
    return result


# One plain run and the variants beside it


def _measure_group(
    plan: Plan, variants: Sequence[Variant], tiers: Tiers, report: Report
) -> Iterator[tuple[Variant, dict[str, Any]]]:
    """Yield the numbers of variants that share their plain run."""
    declared = {v.key: _headroom(plan, v, report) for v in variants}
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
        alternate(
            everyone,
            warmup=plan.warmup,
            rounds=plan.rounds,
            per_turn=plan.per_turn,
            lead=plan.lead,
            on_step=tell,
        )
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
    _say(
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
        "offload_over_bound": median_seconds(offload.measured) / least.seconds,
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


# What people read


def _tiers_json(tiers: Tiers) -> dict[str, float]:
    return {
        "read_bps": tiers.read_bps,
        "write_bps": tiers.write_bps,
        "mixed_bps": tiers.mixed_bps,
        "memory_bps": tiers.memory_bps,
    }


def _say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _print(result: dict[str, Any], variants: Sequence[Variant]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"MoE {result['preset']}, {result['tokens']} tokens per step, AdamW in fp32",
        caption="medians of a step; the bound is the least time any plan could take",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("row")
    for header in ("in memory", "dynoffload", "ratio", "of bound", "paged", "gain", "waiting"):
        table.add_column(header, justify="right")
    for header in ("peak fast", "cgroup peak", "declared", "losses equal"):
        table.add_column(header, justify="right")
    for variant in variants:
        row = result[variant.key] if variant.key else result
        declared = row["process_before_bytes"] + row["budget_bytes"] + row["headroom_bytes"]
        table.add_row(
            variant.key or MAIN,
            format_seconds(row["in_memory_s"]),
            format_seconds(row["offload_s"]),
            f"{row['offload_over_in_memory']:.2f}×",
            f"{row['offload_over_bound']:.2f}×",
            "–" if row["paged_s"] is None else format_seconds(row["paged_s"]),
            "–" if row["paged_over_offload"] is None else f"{row['paged_over_offload']:.1f}×",
            format_seconds(row["stall_s"]),
            format_bytes(row["peak_fast_bytes"]),
            "–" if row["cgroup_peak_bytes"] is None else format_bytes(row["cgroup_peak_bytes"]),
            format_bytes(declared),
            "yes" if row["losses_equal"] else "NO",
        )
    Console().print(table)
