"""Summary of a run in a few numbers and sentences.

Computes the report's headlines and tables and the comparison of policies. Numbers per step are
medians after warm-up, since the first steps build plans and fill caches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from dynoffload.reporting.columns import Columns, spans
from dynoffload.telemetry import PHASES, RunLog, StepStats
from dynoffload.units import format_bytes, format_seconds


class Tone(Enum):
    """Rating of a number: good, worth a look, or wrong; ``PLAIN`` is unrated."""

    GOOD = "good"
    WATCH = "watch"
    BAD = "bad"
    PLAIN = "plain"


@dataclass(frozen=True)
class Headline:
    """One headline number of the page.

    Attributes:
        label: what it is, in two or three words.
        value: the number with its unit.
        meaning: a sentence that explains it to the reader.
        tone: its rating.
        share: 0 to 1 for a bar under the number, or ``None``.
    """

    label: str
    value: str
    meaning: str
    tone: Tone = Tone.PLAIN
    share: float | None = None


class PhaseCost(NamedTuple):
    """One phase over the recorded steps: its seconds, seconds stalled, number of stalls."""

    name: str
    seconds: float
    stall_s: float
    stalls: int


class RegionCost(NamedTuple):
    """One region over the recorded steps: stalls, seconds stalled, fetches and bytes fetched."""

    name: str
    stalls: int
    stall_s: float
    fetches: int
    bytes_in: int


@dataclass(frozen=True)
class RunSummary:
    """Summary of one log after warm-up.

    Attributes:
        steps: steps counted (those after warm-up).
        step_s: median step time in seconds.
        stall_s: median seconds stalled per step.
        stalls: median number of stalls per step.
        bytes_in, bytes_out: median bytes per step read from and written to the file tier.
        prefetched_bytes, wasted_bytes: median bytes per step.
        wasted_share: wasted share of all prefetched bytes, NaN if nothing was prefetched.
        stalled_share: seconds stalled as a share of all seconds.
        accuracy: mean block-order accuracy over steps that had a prediction, NaN without.
        peak_fast_bytes: most bytes in the fast tier in any step, warm-up included.
    """

    steps: int
    step_s: float
    stall_s: float
    stalls: float
    bytes_in: int
    bytes_out: int
    prefetched_bytes: int
    wasted_bytes: int
    wasted_share: float
    stalled_share: float
    accuracy: float
    peak_fast_bytes: int


def warmup_of(steps: Sequence[StepStats]) -> int:
    """Return how many first steps medians leave out: two, fewer in very short runs."""
    return min(2, max(0, len(steps) - 3))


def summarize(log: RunLog, warmup: int | None = None) -> RunSummary:
    """Return the numbers of ``log`` without its first ``warmup`` steps (`warmup_of` by default).

    Raises:
        ValueError: if no step is left.
    """
    steps = log.steps[warmup_of(log.steps) if warmup is None else warmup :]
    if not steps:
        raise ValueError(f"no step left of {len(log.steps)} after warm-up")
    seconds = sum(s.seconds for s in steps)
    prefetched = sum(s.prefetched_bytes for s in steps)
    scored = [s.accuracy for s in steps if not math.isnan(s.accuracy)]
    return RunSummary(
        steps=len(steps),
        step_s=median(s.seconds for s in steps),
        stall_s=median(s.stall_s for s in steps),
        stalls=float(median(s.stalls for s in steps)),
        bytes_in=int(median(s.bytes_in for s in steps)),
        bytes_out=int(median(s.bytes_out for s in steps)),
        prefetched_bytes=int(median(s.prefetched_bytes for s in steps)),
        wasted_bytes=int(median(s.wasted_bytes for s in steps)),
        wasted_share=sum(s.wasted_bytes for s in steps) / prefetched if prefetched else math.nan,
        stalled_share=sum(s.stall_s for s in steps) / seconds if seconds > 0 else 0.0,
        accuracy=fmean(scored) if scored else math.nan,
        peak_fast_bytes=max(s.peak_fast_bytes for s in log.steps),
    )


def in_a_line(log: RunLog) -> str:
    """Return a one-line summary of a session's steps."""
    if not log.steps:
        return f"{log.model} ended before its first step was complete"
    run, count = summarize(log), len(log.steps)
    by = f" by policy {log.policy}" if log.policy == "on-demand" else ""
    return (
        f"{log.model}, {count} step{'s' if count > 1 else ''}{by}: median step "
        f"{format_seconds(run.step_s)}, {format_seconds(run.stall_s)} of it in {run.stalls:.0f} "
        f"stall{'' if run.stalls == 1 else 's'}; {format_bytes(run.bytes_in)} read and "
        f"{format_bytes(run.bytes_out)} written a step; peak of fast memory "
        f"{format_bytes(run.peak_fast_bytes)} "
        f"{'of' if run.peak_fast_bytes <= log.budget else 'PASSED'} the budget of "
        f"{format_bytes(log.budget)}"
    )


def verdict(log: RunLog) -> str:
    """Return the summary of the run as one paragraph."""
    return " ".join(filter(None, (f"{in_a_line(log)}.", tried(log))))


def tried(log: RunLog) -> str:
    """Return which later runs of steps prefetched nothing, and why, or ""."""
    ahead = [step.step for step in log.steps if step.prefetched_bytes]
    between = [
        step.step
        for step in log.steps
        if ahead and ahead[0] < step.step and step.bytes_in and not step.prefetched_bytes
    ]
    runs: list[list[int]] = []
    for step in between:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    spans = [f"{run[0]} to {run[-1]}" for run in runs if len(run) > 1]
    if not spans:
        return ""
    what = (
        "fetching ahead lost such a trial, and stayed off"
        if between[-1] > ahead[-1]
        else "a trial whether fetching ahead pays, which it did"
    )
    return f"Steps {', '.join(spans)} fetched on demand only: {what}."


def headlines(log: RunLog) -> list[Headline]:
    """Return the headline numbers of the page, the most important first."""
    if not log.steps:
        return []
    summary = summarize(log)
    peak_share = summary.peak_fast_bytes / log.budget if log.budget else 1.0
    cards = [
        Headline(
            "Step time",
            format_seconds(summary.step_s),
            f"Computing, hooks and waiting: the median of {summary.steps} "
            f"step{'' if summary.steps == 1 else 's'} after warm-up.",
        ),
        Headline(
            "Waiting for data",
            f"{summary.stalled_share:.1%}",
            _waiting_meaning(summary),
            _tone(summary.stalled_share, 0.05, 0.20),
            summary.stalled_share,
        ),
        Headline(
            "Peak fast memory",
            format_bytes(summary.peak_fast_bytes),
            f"{peak_share:.0%} of the budget of {format_bytes(log.budget)}. The peak may touch the "
            "budget, never pass it.",
            Tone.GOOD if peak_share <= 1 else Tone.BAD,
            min(1.0, peak_share),
        ),
        Headline(
            "Moved per step",
            format_bytes(summary.bytes_in + summary.bytes_out),
            f"{format_bytes(summary.bytes_in)} read from the spill file or files of the model, and "
            f"{format_bytes(summary.bytes_out)} written to the spill file.",
        ),
    ]
    if not math.isnan(summary.wasted_share):
        cards.append(
            Headline(
                "Wasted prefetch",
                f"{summary.wasted_share:.1%}",
                "Share of the bytes fetched ahead that were evicted before anything used them.",
                _tone(summary.wasted_share, 0.05, 0.15),
                summary.wasted_share,
            )
        )
    if not math.isnan(summary.accuracy):
        cards.append(
            Headline(
                "Order predicted",
                f"{summary.accuracy:.1%}",
                "Block-order accuracy: 100% means that each block ran just where it was predicted.",
                _tone(1 - summary.accuracy, 0.05, 0.25),
                summary.accuracy,
            )
        )
    return cards


def left_out(log: RunLog) -> str:
    """Return which records were dropped from the log, and what that means for a reader, or ""."""
    if not log.dropped:
        return ""
    first, last = log.first_detailed, len(log.steps) - 1
    return (
        f"To bound the memory that recording takes, {log.dropped:,} single records (transfers, "
        "waits, phases, samples of memory, orders of blocks) were dropped, those of the oldest "
        f"steps first. What is drawn or summed from them covers steps {first} to {last}; the "
        "headline numbers, the figures step by step and the table of all steps cover the whole run."
    )


def phase_costs(columns: Columns) -> list[PhaseCost]:
    """Return seconds and stalls of each phase. A stall counts in the phase where it begins, its
    time in the phase where it passes; simultaneous stalls count their time once."""
    stalls, costs = columns.stalls, []
    for name in PHASES:
        phase = spans((p.start, p.end, 0.0) for p in columns.log.phases if p.name == name)
        begun = np.searchsorted(stalls.start, phase.end) - np.searchsorted(
            stalls.start, phase.start
        )
        waited = float((stalls.covered(phase.end) - stalls.covered(phase.start)).sum())
        seconds = float((phase.end - phase.start).sum())
        costs.append(PhaseCost(name, seconds, waited, int(begun.sum())))
    return costs


def region_costs(log: RunLog, most: int = 12) -> list[RegionCost]:
    """Return the ``most`` regions with the most stall time, in descending order."""
    waited: dict[str, list[float]] = defaultdict(list)
    for stall in log.stalls:
        waited[stall.region].append(stall.end - stall.start)
    fetched: dict[str, list[int]] = defaultdict(list)
    for transfer in log.transfers:
        if transfer.kind == "fetch":
            fetched[transfer.region].append(transfer.nbytes)
    costs = [
        RegionCost(name, len(times), sum(times), len(fetched[name]), sum(fetched[name]))
        for name, times in waited.items()
    ]
    return sorted(costs, key=lambda cost: (-cost.stall_s, cost.name))[:most]


def _waiting_meaning(summary: RunSummary) -> str:
    if summary.stall_s == 0:
        return (
            "Of the time of all steps after warm-up. In the median step every region was there "
            "before it was needed."
        )
    return (
        f"Of the time of all steps after warm-up. The median step stood still for "
        f"{format_seconds(summary.stall_s)} in {summary.stalls:.0f} "
        f"wait{'' if summary.stalls == 1 else 's'}. Hooks and copies are not in it."
    )


def _tone(share: float, good: float, watch: float) -> Tone:
    if share <= good:
        return Tone.GOOD
    return Tone.WATCH if share <= watch else Tone.BAD
