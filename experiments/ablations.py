"""What each part of a step under a budget takes: it is switched off, one part at a time.

The full step takes turns on the same samples with steps that lack one part, and with plain
training, which confirms the losses. Only a few run at once, each time beside the full step. A
difference is the median over pairs of steps on one sample. Differences do not add up, as parts
overlap. All steps prefetch by the last order: pilots that several processes learn at once would
disturb their steps.

Some switches are options of `OffloadConfig`; `dynoffload.experiments.without` makes the others, and
says what cannot be switched off. Updates in backward leave no gradients to move. Without paged
activations, memory beside the budget holds them. Without comparison, every region that was used is
written. Without the disk, the spill file is in memory, and transfers copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.experiments import contest
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import Turns, Way, median_seconds
from dynoffload.experiments.harness import Cell, Experiment, Row, check_known, option, table
from dynoffload.experiments.overhead import Case, budget_of, cases
from dynoffload.experiments.ways import BUDGETED, Spec
from dynoffload.memory.spill import default_spill_dir
from dynoffload.units import format_bytes, format_seconds

_PER_TURN = 2
_FULL = "full"


@dataclass(frozen=True)
class Switch:
    """How one part is switched off; see `Spec`."""

    config: dict[str, Any] = field(default_factory=dict)
    without: str = ""


SWITCHES = {
    "prefetch": Switch({"policy": "on-demand"}),
    "deferred updates": Switch({"defer_updates": "never"}),
    "saved activations": Switch({"page_activations": False}),
    "gradients": Switch({"optimizer_in_backward": True}),
    "guard thread": Switch(without="guard"),
    "announced visits": Switch(without="visits"),
    "memory samples": Switch(without="samples"),
    "check of reads": Switch(without="checks"),
    "comparison before writes": Switch(without="comparison"),
    "disk": Switch(without="disk"),
}
"""What is switched off, by its name in tables."""


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    only: tuple[str, ...] = option(
        ("small mixture", "base mixture, 1,024 tokens"), "cases of overhead, by name"
    )
    steps: int = option(8, "of each way that count, two a turn")
    at_once: int = option(3, "ways that run beside plain training and the full step")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.at_once < 1:
            raise ConfigError("steps and at_once are at least 1")


class Ablations(Experiment[Params]):
    """A case is a network under a budget."""

    parameters = Params

    def cases(self) -> Mapping[str, Case]:
        known = cases()
        check_known("only", self.params.only, known, some=True)
        return {name: known[name] for name in self.params.only}

    def run(self, case: Case) -> Row:
        own, names = self.params, list(SWITCHES)
        budget, _ = budget_of(case, self.report)
        plain = replace(
            case.spec, split="held-out", spill_dir=str(own.spill_dir or default_spill_dir())
        )
        turns = Turns(-(-own.steps // _PER_TURN), case.warmup, _PER_TURN)
        found: dict[str, Row] = {}
        for begin in range(0, len(names), own.at_once):
            some = {name: SWITCHES[name] for name in names[begin : begin + own.at_once]}
            ways = {
                name: Way(_budgeted(plain, budget, one))
                for name, one in {_FULL: Switch(), **some}.items()
            }
            measured = contest.measure(plain, ways, turns, self.report)
            full = measured.sides[_FULL]
            for name in some:
                found[name] = {
                    **asdict(measured.sides[name]),
                    "full_steps_s": full.steps_s,
                    "full_why": full.why,
                    "plain_s": median_seconds(measured.plain),
                }
        return {"budget_bytes": budget, "ways": found}

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        lines = [
            {**row, "without": name, **way, "why": way["why"] or way["full_why"]}
            for row in result["rows"]
            for name, way in row["ways"].items()
        ]
        known = [line for line in lines if not line["why"]]
        return [
            table("a step without one part", _COLUMNS, known, ["without"]),
            *(
                f"{line['case']}, without {line['without']}: {line['why']}"
                for line in lines
                if line["why"]
            ),
        ]


def _budgeted(plain: Spec, budget: int, switch: Switch) -> Spec:
    config = {"policy": "repeat", **switch.config}
    return replace(plain, mode=BUDGETED, budget=budget, config=config, without=switch.without)


def _difference_s(row: Mapping[str, Any]) -> float:
    pairs = zip(row["steps_s"], row["full_steps_s"], strict=True)
    return float(median(own - full for own, full in pairs))


_COLUMNS: dict[str, Cell] = {
    "network": lambda row: row["case"],
    "without": lambda row: row["without"],
    "budget": lambda row: format_bytes(row["budget_bytes"]),
    "plain": lambda row: format_seconds(row["plain_s"]),
    "full step": lambda row: format_seconds(median(row["full_steps_s"])),
    "a step": lambda row: format_seconds(median(row["steps_s"])),
    "difference": lambda row: f"{_difference_s(row) * 1e3:+.0f} ms",
    "of the full step": lambda row: f"{_difference_s(row) / median(row['full_steps_s']):+.0%}",
    "stall": lambda row: format_seconds(row["stall_s"]),
    "MB read": lambda row: f"{row['bytes_in'] / 1e6:.0f}",
    "written": lambda row: f"{row['bytes_out'] / 1e6:.0f}",
    "losses equal": lambda row: {True: "yes", False: "NO", None: ""}[row["losses_equal"]],
}
