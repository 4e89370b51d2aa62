"""What dynoffload costs where it is not needed: a budget that holds everything.

Two networks are trained plain, plain again, and under a budget larger than they need, in three
processes that take turns step by step on the same samples. The result is the median ratio of paired
steps. That of plain over plain is the control: a ratio within its distance from 1 means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from dynoffload.experiments.harness import Cell, Experiment, Row, option, turns
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import Worker, losses_equal, median_seconds, worker
from dynoffload.units import format_seconds, parse_bytes

COLUMNS: dict[str, Cell] = {
    "network": lambda row: row["case"],
    "plain": lambda row: format_seconds(row["plain_s"]),
    "dynoffload": lambda row: format_seconds(row["offload_s"]),
    "ratio": lambda row: f"{row['ratio']:.3f}×",
    "plain/plain": lambda row: f"{row['control_ratio']:.3f}×",
    "resident": lambda row: "yes" if row["stepped_aside"] else "no",
    "losses equal": lambda row: "yes" if row["losses_equal"] else "NO",
}


@dataclass(frozen=True)
class Params:
    """What is measured."""

    preset: str = option("small", "sizes of both networks")
    moe_tokens: int = option(256, "per step of the MoE language model")
    moe_steps: int = option(40, "its measured steps")
    tree_steps: int = option(150, "measured steps of the Tree-LSTM; one tree each")
    warmup: int = option(12, "steps before them, in which paging finds that it is not needed")
    moe_budget: str = option("2GiB", "of the MoE, for all that its training keeps")
    tree_budget: str = option("512MiB", "of the Tree-LSTM; the same")
    spill_dir: Path | None = option(None, "where spill files of the first steps lie", place=True)


class Resident(Experiment[Params]):
    """A case is a network."""

    parameters = Params
    title = "a budget that holds everything; ratios: medians over pairs of steps on the same sample"
    columns = COLUMNS

    def cases(self) -> Mapping[str, tuple[Spec, int]]:
        own = self.params
        directory = None if own.spill_dir is None else str(own.spill_dir)
        moe = Spec("moe", own.preset, shape={"length": own.moe_tokens}, spill_dir=directory)
        tree = Spec("tree", own.preset, spill_dir=directory)
        return {
            "moe": (replace(moe, budget=parse_bytes(own.moe_budget)), own.moe_steps),
            "tree": (replace(tree, budget=parse_bytes(own.tree_budget)), own.tree_steps),
        }

    def run(self, case: tuple[Spec, int]) -> Row:
        spec, steps = case
        warmup = self.params.warmup
        with (
            worker("plain", spec) as plain,
            worker("plain again", spec) as again,
            worker("dynoffload", replace(spec, mode=BUDGETED)) as ours,
        ):
            stepping = turns([plain, again, ours], warmup=warmup, rounds=steps)
            for number, (each, measured) in enumerate(stepping):
                self.report(f"{spec.network}: {each.name}", number, 3 * (steps + warmup))
                each.step(measured=measured)
            pairs = _pairs(plain, ours)
            state = ours.ask("state")
            return {
                "ratio": median(pairs),
                "control_ratio": median(_pairs(plain, again)),
                "plain_s": median_seconds(plain.measured),
                "offload_s": median_seconds(ours.measured),
                "budget_bytes": spec.budget,
                "peak_fast_bytes": state["peak_fast_bytes"],
                "stepped_aside": not state["paging"],
                "losses_equal": losses_equal(plain, ours),
                "pairs": pairs,
            }


def _pairs(plain: Worker, other: Worker) -> list[float]:
    """Return how much longer each step of ``other`` took than the plain one on its sample."""
    return [b.seconds / a.seconds for a, b in zip(plain.measured, other.measured, strict=True)]
