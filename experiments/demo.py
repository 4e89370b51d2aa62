"""See it work: profile, train a pilot, train under one eighth of the memory, compare.

What it is: the whole way in two to three minutes, with a language model of routed experts on real
source text: record steps, learn a pilot from them, then train the same steps plain and under one
eighth of what they take, on demand, by the last order and by the pilot; one table, one report. What
it is not: a benchmark; the runs follow one another in one process. For figures see
`dynoffload.experiments.paged` and `dynoffload.experiments.pilot_benefit`.
"""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.trainer import finite
from dynoffload.pilot.progress import Report, progress_bar
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
_HOW = (
    "The same network, weights and samples each time: plain PyTorch with all the memory "
    "it takes, the others under the budget. They ran one after another, and a machine's speed "
    "drifts meanwhile: small differences mean little. The rest of this page is about the run that "
    "the pilot steered."
)


def run(
    json_path: Path | None = None,
    *,
    preset: str = "small",
    tokens: int = 128,
    profiled: int = 48,
    steps: int = 24,
    lr: float = 3e-4,
    out: Path = Path("out/demo.html"),
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Run the demonstration.

    Args:
        json_path: not used; the numbers are written by the caller.
        preset: sizes of the MoE language model.
        tokens: per step.
        profiled: steps recorded for the pilot.
        steps: steps of each of the four trainings.
        lr: learning rate.
        out: the page with the report of the run that the pilot steers.
        spill_dir: where the spill files lie.
    """
    from dynoffload.experiments import make_room
    from dynoffload.reporting import Comparison, ComparisonRow, comparison_table, write_run

    make_room(out, "--out")
    begin = time.perf_counter()
    _say("six phases, which take two to three minutes on two cores without other work")
    with progress_bar(sys.stderr.isatty()) as report, tempfile.TemporaryDirectory() as scratch:
        _say(
            f"1/6 recording {profiled} plain steps of a language model of routed experts, and "
            "training a pilot on them"
        )
        pilot, footprint_bytes, accuracy = _pilot(
            Path(scratch), preset, tokens, profiled, lr, report
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
        compared = Comparison(f"Four ways to train: {title}", tuple(rows), budget, _HOW)
        files = write_run(logs["pilot"], out, comparison=compared)
    _print(comparison_table(rows, title=title, budget=budget, upright=True))
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
        f"recorded {profiled} steps; a pilot ({trained.pilot.kind}) learned from "
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
