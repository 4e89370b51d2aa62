"""What dynoffload costs where it is not needed: a budget that holds everything.

Two networks are trained plain, plain again, and under a budget larger than they need, in three
processes that take turns step by step on the same samples. The result is the median ratio of paired
steps. That of plain over plain is the control: a ratio within its distance from 1 means nothing.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from dynoffload.experiments.harness import turns
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import (
    Worker,
    losses_equal,
    median_seconds,
    worker,
)
from dynoffload.pilot.progress import Report, progress_bar
from dynoffload.units import format_seconds, parse_bytes

NETWORKS = ("moe", "tree")


def run(
    json_path: Path | None = None,
    *,
    preset: str = "small",
    moe_tokens: int = 256,
    moe_steps: int = 40,
    tree_steps: int = 150,
    warmup: int = 12,
    moe_budget: str = "2GiB",
    tree_budget: str = "512MiB",
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Measure both networks.

    Args:
        json_path: not used; the numbers are written by the caller.
        preset: sizes of both.
        moe_tokens: tokens per step of the MoE language model.
        moe_steps: its measured steps.
        tree_steps: measured steps of the Tree-LSTM; one tree each.
        warmup: steps before them, in which paging finds that it is not needed.
        moe_budget: of the MoE; must hold parameters, gradients, state and activations.
        tree_budget: of the Tree-LSTM; the same.
        spill_dir: where the spill files of the first steps lie.
    """
    directory = None if spill_dir is None else str(spill_dir)
    specs = {
        "moe": (
            Spec("moe", preset, shape={"length": moe_tokens}, spill_dir=directory),
            moe_steps,
            parse_bytes(moe_budget),
        ),
        "tree": (Spec("tree", preset, spill_dir=directory), tree_steps, parse_bytes(tree_budget)),
    }
    result: dict[str, Any] = {"preset": preset, "moe_tokens": moe_tokens}
    with progress_bar(True) as report:
        for name in NETWORKS:
            spec, steps, budget = specs[name]
            result |= _measure(name, spec, budget, steps, warmup, report)
    _print(result)
    return result


def _measure(
    name: str, spec: Spec, budget: int, steps: int, warmup: int, report: Report
) -> dict[str, Any]:
    """Return the numbers of one network, each key beginning with its name."""
    budgeted = Spec(**{**vars(spec), "mode": BUDGETED, "budget": budget})
    done = 0

    def tell(stepped: Worker) -> None:
        nonlocal done
        done += 1
        report(f"{name}: {stepped.name}", done, 3 * (steps + warmup))

    report(f"{name}: starting", 0, None)
    with (
        worker("plain", spec) as plain,
        worker("plain again", spec) as again,
        worker("dynoffload", budgeted) as ours,
    ):
        everyone = [plain, again, ours]
        for each, measured in turns(everyone, warmup=warmup, rounds=steps):
            each.step(measured=measured)
            tell(each)
        pairs = _pairs(plain, ours)
        state = ours.ask("state")
        return {
            f"{name}_ratio": median(pairs),
            f"{name}_control_ratio": median(_pairs(plain, again)),
            f"{name}_plain_s": median_seconds(plain.measured),
            f"{name}_offload_s": median_seconds(ours.measured),
            f"{name}_budget_bytes": budget,
            f"{name}_peak_fast_bytes": state["peak_fast_bytes"],
            f"{name}_stepped_aside": not state["paging"],
            f"{name}_losses_equal": losses_equal(plain, ours),
            f"{name}_pairs": pairs,
        }


def _pairs(plain: Worker, other: Worker) -> list[float]:
    """Return how much longer each step of ``other`` took than the plain one on its sample."""
    return [b.seconds / a.seconds for a, b in zip(plain.measured, other.measured, strict=True)]


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"a budget that holds everything, preset {result['preset']}",
        caption="ratios: medians over pairs of steps on the same sample",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("network")
    for header in ("plain", "dynoffload", "ratio", "plain/plain", "resident", "losses equal"):
        table.add_column(header, justify="right")
    for name in NETWORKS:
        table.add_row(
            name,
            format_seconds(result[f"{name}_plain_s"]),
            format_seconds(result[f"{name}_offload_s"]),
            f"{result[f'{name}_ratio']:.3f}×",
            f"{result[f'{name}_control_ratio']:.3f}×",
            "yes" if result[f"{name}_stepped_aside"] else "no",
            "yes" if result[f"{name}_losses_equal"] else "NO",
        )
    Console().print(table)
