"""Training in a third of its memory: plain, under a budget in a cgroup, and by the system's swap.

One network is trained three ways, each in a process of its own: (a) plain PyTorch with all the
memory it wants; (b) dynoffload under ``budget`` in a cgroup of ``limit`` without swap, built on the
meta device; (c) plain PyTorch in such a cgroup with a swap file. (a) and all variants of (b) take
turns on one machine; (c) runs after them. All make the same steps on the same samples, and their
losses are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynoffload.doctor import Tiers, measure_tiers
from dynoffload.errors import ConfigError
from dynoffload.experiments import write_json
from dynoffload.experiments.baselines.cgroup import LimitError, why_unavailable
from dynoffload.experiments.comparing import Table, show
from dynoffload.experiments.paged_rows import MAIN, ROWS, VARIANTS, Plan, Variant, measure_group
from dynoffload.experiments.zoo import FUSED
from dynoffload.memory.spill import default_spill_dir
from dynoffload.pilot.progress import progress_bar
from dynoffload.units import format_bytes, format_seconds, parse_bytes

_TIER_SECONDS = 0.5


def run(
    json_path: Path | None = None,
    *,
    rows: tuple[str, ...] = ROWS,
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
        rows: names of `VARIANTS`; without it `ROWS`.
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
    if any(VARIANTS[row].network == FUSED for row in rows) and find_spec("transformers") is None:
        others = ",".join(row for row in rows if VARIANTS[row].network != FUSED)
        raise ConfigError(
            f"the row {FUSED!r} takes a network of transformers, which is not installed: install "
            f"it, or measure --rows {others or MAIN}"
        )
    if steps < 1 or profile_steps < 1 or warmup < 1 or paged_steps < 0:
        raise ConfigError("steps, warmup and profile_steps are at least 1, paged_steps at least 0")
    if limited and (reason := why_unavailable(swap=paged_steps > 0)):
        raise LimitError(
            f"{reason}: neither dynoffload within a hard limit nor the system's paging can be "
            "measured. Run as root on a system with memory cgroups, or pass --limited=false to "
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
        spill_dir=spill_dir or default_spill_dir(),
    )
    chosen = [VARIANTS[row] for row in VARIANTS if row in rows]
    result: dict[str, Any] = {}
    with progress_bar(True) as report:
        report("bandwidth of the tiers")
        tiers = measure_tiers(plan.spill_dir, _TIER_SECONDS)
        for group in dict.fromkeys(variant.group for variant in chosen):
            members = [variant for variant in chosen if variant.group == group]
            for variant, row in measure_group(plan, members, tiers, report):
                if variant.key:
                    result[variant.key] = row
                else:
                    result = {**row, **result}
                if json_path is not None:
                    write_json(json_path, result)
    result |= {"preset": plan.preset, "tokens": plan.tokens, "tiers": _tiers_json(tiers)}
    _print(result, chosen)
    return result


def _tiers_json(tiers: Tiers) -> dict[str, float]:
    return {
        "read_bps": tiers.read_bps,
        "write_bps": tiers.write_bps,
        "mixed_bps": tiers.mixed_bps,
        "memory_bps": tiers.memory_bps,
    }


def _print(result: dict[str, Any], variants: Sequence[Variant]) -> None:
    rows = [_shown(result[variant.key] if variant.key else result) for variant in variants]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    show(
        Table(
            f"MoE {result['preset']}, {result['tokens']} tokens per step, AdamW in fp32",
            ["a step", *(variant.key or MAIN for variant in variants)],
            [[head, *(row.get(head, "–") for row in rows)] for head in heads],
        ),
        "medians of a step; the bound is the least time of any plan that makes updates in forward; "
        "spread, of any plan at all",
    )


def _shown(row: dict[str, Any]) -> dict[str, str]:
    """Return the numbers of a row as texts, by what they are called."""
    if "infeasible" in row:
        return {"cannot run": row["infeasible"]}
    declared = row["process_before_bytes"] + row["budget_bytes"] + row["headroom_bytes"]
    paged, peak = row["paged_s"], row["cgroup_peak_bytes"]
    return {
        "plain, in memory": format_seconds(row["in_memory_s"]),
        "dynoffload": format_seconds(row["offload_s"]),
        "… vs in memory": f"{row['offload_over_in_memory']:.2f}×",
        "… vs bound": f"{row['offload_over_bound']:.2f}×",
        "… vs bound, spread": f"{row['offload_over_spread']:.2f}×",
        "… waiting": format_seconds(row["stall_s"]),
        "paged by the system": "–" if paged is None else format_seconds(paged),
        "… vs dynoffload": "–" if paged is None else f"{row['paged_over_offload']:.1f}×",
        "peak fast": format_bytes(row["peak_fast_bytes"]),
        "cgroup peak": "–" if peak is None else format_bytes(peak),
        "… declared": format_bytes(declared),
        "losses equal": "yes" if row["losses_equal"] else "NO",
    }
