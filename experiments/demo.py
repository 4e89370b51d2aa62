"""See it work: profile, train a pilot, train under one eighth of the memory, compare.

The whole way in two to three minutes, with a language model of routed experts on real source text:
record steps, learn a pilot from them, then train the same steps plain and under one eighth of what
they take, on demand, by the last order and by the pilot; one table, one report. It is no benchmark:
the runs follow one another in one process.
"""

from __future__ import annotations

import gc
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, option
from dynoffload.experiments.trainer import finite
from dynoffload.pilot.progress import Report
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dynoffload.experiments.zoo.building import ZooSample
    from dynoffload.reporting.tables import ComparisonRow
    from dynoffload.telemetry import RunLog

logger = logging.getLogger(__name__)

NETWORK = "moe"
SHARE = 8
"""The budget is one part in so many of the footprint."""
_WARMUP = 2  # as the report page leaves out


@dataclass(frozen=True)
class Params:
    """What is trained."""

    preset: str = option("small", "sizes of the MoE language model")
    tokens: int = option(128, "per step")
    profiled: int = option(48, "steps recorded for the pilot")
    steps: int = option(24, "of each of the four trainings")
    lr: float = option(3e-4, "learning rate")
    out: Path = option(Path("out/demo.html"), "the report of the run that the pilot steers")
    spill_dir: Path | None = option(None, "where the spill files lie", place=True)


class Demo(Experiment[Params]):
    """The one case is all of it."""

    parameters = Params
    resumes = False

    def cases(self) -> Mapping[str, None]:
        return {"demo": None}

    def run(self, case: None) -> Row:
        return demonstrate(self.params, self.report)

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        return []


def demonstrate(params: Params, report: Report) -> Row:
    """Run the demonstration."""
    from dynoffload.experiments import make_room
    from dynoffload.reporting import ComparisonRow, comparison_table, write_run

    preset, tokens, steps, lr = params.preset, params.tokens, params.steps, params.lr
    out, spill_dir = params.out, params.spill_dir
    make_room(out, "--out")
    begin = time.perf_counter()
    _say("six phases, which take two to three minutes on two cores without other work")
    with tempfile.TemporaryDirectory() as scratch:
        _say(
            f"1/6 recording {params.profiled} plain steps of a language model of routed experts, "
            "and training a pilot on them"
        )
        pilot, footprint_bytes, accuracy = _pilot(
            Path(scratch), preset, tokens, params.profiled, lr, report
        )
        budget = footprint_bytes // SHARE
        _say(
            f"a step takes {format_bytes(footprint_bytes)} (parameters, gradients, optimizer state "
            f"and activations); the budget is one eighth: {format_bytes(budget)}"
        )
        samples = _samples(tokens, steps, data_seed=1)
        _say(f"2/6 training {steps} steps with plain PyTorch, in all the memory it takes")
        losses, seconds = _plain(preset, samples, lr, report)
        rows = [ComparisonRow("plain", median(seconds[_WARMUP:]), peak_fast_bytes=footprint_bytes)]
        logs: dict[str, RunLog] = {}
        equal: dict[str, bool] = {}
        for number, (name, policy, steers, how) in enumerate(
            (
                ("on-demand", "on-demand", None, "without prefetch"),
                ("repeat-last", "repeat", None, "with prefetch by the order of the step before"),
                ("pilot", "pilot", pilot, "with prefetch by the pilot"),
            ),
            3,
        ):
            _say(f"{number}/6 training the same steps under the budget, {how}")
            found, log = _offloaded(
                name, preset, samples, lr, budget, policy, steers, spill_dir, report
            )
            logs[name], equal[name] = log, found == losses
            rows.append(ComparisonRow.of(name, log, losses_equal=equal[name], warmup=_WARMUP))
        _say("6/6 writing the report")
        title = f"MoE {preset}, {tokens} tokens a step"
        files = write_run(logs["pilot"], out)
    _print(comparison_table(rows, title=title, budget=budget))
    took = time.perf_counter() - begin
    for line in _told(rows, logs["pilot"], budget, steps):
        _say(line)
    _say(
        f"Look at {files.page} in a browser, at {files.perfetto} in ui.perfetto.dev, and at the "
        "README for the 15 lines that train a network of yours."
    )
    _say(f"(all of it took {format_seconds(took)})")
    return {
        "preset": preset,
        "tokens": tokens,
        "steps": steps,
        "footprint_bytes": footprint_bytes,
        "budget_bytes": budget,
        "pilot_held_out_accuracy": finite(accuracy),
        "losses_equal": all(equal.values()),
        "seconds": took,
        "report": str(files.page),
        "runs": {row.name.replace(" ", "_").replace("-", "_"): _numbers(row) for row in rows},
    }


def _told(rows: Sequence[ComparisonRow], log: RunLog, budget: int, steps: int) -> Iterator[str]:
    """Yield what was trained in how much, and at what price: a sentence each."""
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


def _pilot(
    folder: Path, preset: str, tokens: int, profiled: int, lr: float, report: Report
) -> tuple[Path, int, float]:
    """Return the path of a trained pilot, the footprint of a step, and the pilot's accuracy."""
    from dynoffload.experiments.pilot_cases import Case
    from dynoffload.experiments.pilot_recording import recorded
    from dynoffload.pilot.train import train_pilot
    from dynoffload.planning.footprint import footprint
    from dynoffload.profiler import load_trace, trace_files

    case = Case("profile", NETWORK, preset, {"length": tokens})
    with recorded(case, profiled, lr, report, keep=folder / "traces") as traces:
        report("pilot: learning")
        trained = train_pilot(traces, progress=False)
        path = folder / "demo.pilot"
        trained.pilot.save(path)
        paths = trace_files(traces)
        total = max(footprint(load_trace(trace)).total for trace in paths[-8:])
    score = trained.evaluation.pilot.block_order_accuracy
    _say(
        f"recorded {profiled} steps; a pilot learned from "
        f"{trained.train_samples} of them and scores {score:.1%} on files it has not seen"
    )
    return path, total, score


def _samples(tokens: int, steps: int, data_seed: int) -> list[ZooSample]:
    from dynoffload.experiments import zoo

    return list(islice(zoo.samples(NETWORK, "held-out", seed=data_seed, length=tokens), steps))


def _train(
    name: str, model: Any, optimizer: Any, samples: list[ZooSample], report: Report
) -> tuple[list[float], list[float]]:
    """Make a step of each sample; return the losses and the seconds."""
    losses: list[float] = []
    seconds: list[float] = []
    for number, sample in enumerate(samples):
        report(f"training: {name}", number, len(samples))
        begin = time.perf_counter()
        loss = model(*sample.args).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


def _network(preset: str, lr: float) -> tuple[Any, Any]:
    import torch

    from dynoffload.experiments import zoo

    gc.collect()
    model = zoo.build(NETWORK, preset)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def _plain(
    preset: str, samples: list[ZooSample], lr: float, report: Report
) -> tuple[list[float], list[float]]:
    model, optimizer = _network(preset, lr)
    return _train("plain PyTorch", model, optimizer, samples, report)


def _offloaded(
    name: str,
    preset: str,
    samples: list[ZooSample],
    lr: float,
    budget: int,
    policy: str,
    pilot: Path | None,
    spill_dir: Path | None,
    report: Report,
) -> tuple[list[float], RunLog]:
    import dynoffload

    model, optimizer = _network(preset, lr)
    with dynoffload.offload(
        model,
        optimizer,
        budget=budget,
        pilot=pilot,
        spill_dir=spill_dir,
        config={"policy": policy},
    ) as session:
        losses, _ = _train(name, model, optimizer, samples, report)
        return losses, session.log


def _numbers(row: ComparisonRow) -> dict[str, Any]:
    return {key: finite(value) for key, value in vars(row).items() if key != "name"}


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table)


def _say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
