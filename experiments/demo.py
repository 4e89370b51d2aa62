"""See it work: profile, train a pilot, train under one eighth of the memory, compare.

Takes two to three minutes, with a language model of routed experts on real source text. Records
steps and trains a pilot on them. Then trains the same steps with plain PyTorch, and under an eighth
of their memory: on demand, by the last order, and by the pilot. Prints one table and writes one
report. It is no benchmark: the runs follow one another in one process.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dynoffload.experiments import make_room
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, option
from dynoffload.experiments.pilot_recording import learned
from dynoffload.experiments.trainer import Trainer, finite
from dynoffload.experiments.ways import BUDGETED, PLAIN, Spec
from dynoffload.pilot.progress import Report
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dynoffload.reporting.tables import ComparisonRow
    from dynoffload.telemetry import RunLog

SHARE = 8
"""The budget is the footprint divided by this."""
_WARMUP = 2  # the same as on the report page


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    preset: str = option("small", "sizes of the MoE language model")
    tokens: int = option(128, "per step")
    profiled: int = option(48, "steps recorded for the pilot")
    steps: int = option(24, "of each of the four trainings")
    lr: float = option(3e-4, "learning rate")
    out: Path = option(Path("out/demo.html"), "the report of the run that the pilot steers")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)


WAYS: dict[str, tuple[str, str]] = {
    PLAIN: ("", "with plain PyTorch, in all the memory it takes"),
    "on-demand": ("on-demand", "under the budget, without prefetch"),
    "repeat-last": ("repeat", "under the budget, with prefetch by the order of the step before"),
    "pilot": ("pilot", "under the budget, with prefetch by the pilot"),
}
"""Name of a training -> the policy of its block, and its description in the report."""


class Demo(Experiment[Params]):
    """The only case is the whole demo."""

    parameters = Params
    resumes = False

    def cases(self) -> Mapping[str, None]:
        make_room(self.params.out, "--out")
        return {"demo": None}

    def run(self, case: None) -> Row:
        from rich.console import Console

        from dynoffload.reporting import ComparisonRow, comparison_table, write_run

        own, begin = self.params, time.perf_counter()
        where = None if own.spill_dir is None else str(own.spill_dir)
        plain = Spec("moe", own.preset, shape={"length": own.tokens}, lr=own.lr, spill_dir=where)
        _say("six phases, which take two to three minutes on two cores without other work")
        _say(
            f"1/6 recording {own.profiled} plain steps of a language model of routed experts, "
            "and training a pilot on them"
        )
        rows: list[ComparisonRow] = []
        with tempfile.TemporaryDirectory() as scratch:
            pilot = Path(scratch) / "demo.pilot"
            footprint, trained = learned(plain, own.profiled, self.report, pilot)
            accuracy = trained.evaluation.pilot.block_order_accuracy
            _say(
                f"recorded {own.profiled} steps; a pilot learned from {trained.train_samples} of "
                f"them and scores {accuracy:.1%} on files it has not seen"
            )
            budget = footprint // SHARE
            _say(
                f"a step takes {format_bytes(footprint)} (parameters, gradients, optimizer "
                f"state and activations); the budget is one eighth: {format_bytes(budget)}"
            )
            plain = replace(plain, split="held-out", data_seed=1)
            for number, (name, (policy, how)) in enumerate(WAYS.items(), 2):
                _say(f"{number}/6 training {own.steps} steps {how}")
                spec = replace(plain, mode=BUDGETED, budget=budget, config={"policy": policy})
                steers = str(pilot) if policy == "pilot" else None
                spec = replace(spec, pilot=steers) if policy else plain
                found, seconds, log = _trained(name, spec, own.steps, self.report)
                if log is None:
                    losses, step_s = found, median(seconds[_WARMUP:])
                    rows.append(ComparisonRow(name, step_s, peak_fast_bytes=footprint))
                else:
                    equal = found == losses
                    rows.append(ComparisonRow.of(name, log, losses_equal=equal, warmup=_WARMUP))
        assert log is not None
        _say("6/6 writing the report")
        files = write_run(log, own.out)
        title = f"MoE {own.preset}, {own.tokens} tokens a step"
        Console().print(comparison_table(rows, title=title, budget=budget))
        took = time.perf_counter() - begin
        for line in _outcome(rows, log, budget, own.steps):
            _say(line)
        _say(
            f"Look at {files.page} in a browser, at {files.perfetto} in ui.perfetto.dev, and at "
            "the README for the 15 lines that train a network of yours."
        )
        _say(f"(all of it took {format_seconds(took)})")
        return {
            "footprint_bytes": footprint,
            "budget_bytes": budget,
            "pilot_held_out_accuracy": finite(accuracy),
            "losses_equal": all(row.losses_equal for row in rows[1:]),
            "seconds": took,
            "report": str(files.page),
            "runs": {row.name.replace("-", "_"): _numbers(row) for row in rows},
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        return []


def _trained(
    name: str, spec: Spec, steps: int, report: Report
) -> tuple[list[str], list[float], RunLog | None]:
    """Train; return the losses, the seconds, and the log of the block, if any."""
    gc.collect()
    trainer, made = Trainer(spec), []
    with trainer.training():
        for number in range(steps):
            report(f"training: {name}", number, steps)
            made.append(trainer.step())
    log = None if trainer.session is None else trainer.session.log
    return [one["loss"] for one in made], [one["seconds"] for one in made], log


def _outcome(rows: Sequence[ComparisonRow], log: RunLog, budget: int, steps: int) -> Iterator[str]:
    """Yield one sentence on memory and losses, and one on step times."""
    plain, *paged = rows
    times = {row.name: format_seconds(row.step_s) for row in rows}
    peak = max(row.peak_fast_bytes or 0 for row in paged)
    equal = all(row.losses_equal for row in paged)
    yield (
        f"Trained: {steps} steps of a {log.model} that takes "
        f"{format_bytes(plain.peak_fast_bytes or 0)} with plain PyTorch, in {format_bytes(peak)} "
        f"of a budget of {format_bytes(budget)}, with "
        + ("every loss bit for bit the same." if equal else "losses that DIFFER from plain ones.")
    )
    yield (
        f"Price: a step takes {times['pilot']} with the pilot, {times['repeat-last']} by the last "
        f"order and {times['on-demand']} without prefetch, where plain PyTorch takes "
        f"{times[plain.name]}; so {paged[-1].step_s / plain.step_s:.1f} times as long, in one run "
        "of each."
    )


def _numbers(row: ComparisonRow) -> dict[str, Any]:
    return {key: finite(value) for key, value in vars(row).items() if key != "name"}


def _say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
