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
from collections.abc import Callable, Iterator, Mapping
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
        from dynoffload.reporting import write_run
        from dynoffload.reporting.summary import summarize

        own, begin = self.params, time.perf_counter()
        where = None if own.spill_dir is None else str(own.spill_dir)
        plain = Spec("moe", own.preset, shape={"length": own.tokens}, lr=own.lr, spill_dir=where)
        _say("six phases, which take two to three minutes on two cores without other work")
        _say(
            f"1/6 recording {own.profiled} plain steps of a language model of routed experts, "
            "and training a pilot on them"
        )
        runs: dict[str, dict[str, Any]] = {}
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
                    runs[name] = {"step_s": step_s, "peak_fast_bytes": footprint}
                else:
                    numbers = {k: finite(v) for k, v in vars(summarize(log, _WARMUP)).items()}
                    runs[name] = {**numbers, "losses_equal": found == losses}
        assert log is not None
        _say("6/6 writing the report")
        files = write_run(log, own.out)
        took = time.perf_counter() - begin
        for line in _outcome(runs, log, budget, own.steps):
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
            "losses_equal": all(run.get("losses_equal", True) for run in runs.values()),
            "seconds": took,
            "report": str(files.page),
            "runs": {name.replace("-", "_"): run for name, run in runs.items()},
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        (row,) = result["rows"]
        runs = row["runs"]
        plain = runs[PLAIN]["step_s"]
        lines: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "step time": lambda run: format_seconds(run["step_s"]),
            "vs plain": lambda run: f"{run['step_s'] / plain:.2f}×",
            "stalled": lambda run: format_seconds(run["stall_s"]),
            "stalls": lambda run: f"{run['stalls']:.0f}",
            "read": lambda run: format_bytes(run["bytes_in"]),
            "written": lambda run: format_bytes(run["bytes_out"]),
            "wasted prefetch": lambda run: format_bytes(run["wasted_bytes"]),
            "order predicted": lambda run: f"{run['accuracy']:.1%}",
            "peak memory": lambda run: format_bytes(run["peak_fast_bytes"]),
            "same losses": lambda run: "yes" if run["losses_equal"] else "NO",
        }
        cells = [
            [label, *(_cell(shown, run) for run in runs.values())] for label, shown in lines.items()
        ]
        title = (
            f"MoE {self.params.preset}, {self.params.tokens} tokens a step, medians after warm-up; "
            f"budget {format_bytes(row['budget_bytes'])}"
        )
        return [Table(title, ("a step", *(name.replace("_", "-") for name in runs)), cells)]


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


def _cell(shown: Callable[[Mapping[str, Any]], str], run: Mapping[str, Any]) -> str:
    """Return a cell; plain PyTorch moves no bytes, and not every run predicts."""
    try:
        return shown(run)
    except (KeyError, TypeError):
        return "–"


def _outcome(
    runs: Mapping[str, Mapping[str, Any]], log: RunLog, budget: int, steps: int
) -> Iterator[str]:
    """Yield one sentence on memory and losses, and one on step times."""
    plain, *paged = runs.values()
    times = {name: format_seconds(run["step_s"]) for name, run in runs.items()}
    equal = all(run["losses_equal"] for run in paged)
    yield (
        f"Trained: {steps} steps of a {log.model} that takes "
        f"{format_bytes(plain['peak_fast_bytes'])} with plain PyTorch, in "
        f"{format_bytes(max(run['peak_fast_bytes'] for run in paged))} "
        f"of a budget of {format_bytes(budget)}, with "
        + ("every loss bit for bit the same." if equal else "losses that DIFFER from plain ones.")
    )
    yield (
        f"Price: a step takes {times['pilot']} with the pilot, {times['repeat-last']} by the last "
        f"order and {times['on-demand']} without prefetch, where plain PyTorch takes "
        f"{times[PLAIN]}; so {paged[-1]['step_s'] / plain['step_s']:.1f} times as long, in one run "
        "of each."
    )


def _say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
