"""The figures of the report, one function per figure; each returns an SVG element.

``columns`` and ``summary`` compute the numbers; ``canvas`` styles axes and colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynoffload.reporting.canvas import (
    COLOR,
    legend,
    round_up,
    step_marks,
    svg,
    time_axis,
    unit_of,
)
from dynoffload.reporting.columns import Columns, Floats, Spans, envelope
from dynoffload.telemetry import PHASES, StepStats
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 700  # bins of a curve over the whole run
_BARS = 120  # bars of a figure over steps
_BUSY = "computing and hooks"  # not recorded separately


def run_figure(columns: Columns) -> str:
    """Return fast-tier bytes with the budget and the RSS, bandwidth in both directions, and when
    steps stalled, over the recorded time."""
    unit, name = unit_of(max(columns.log.budget, 1))
    budget = columns.log.budget / unit

    def draw(figure: Figure) -> None:
        memory, traffic, waiting = figure.subplots(
            3, 1, sharex=True, gridspec_kw={"height_ratios": [4, 4, 1], "hspace": 0.12}
        )
        fast = _fast_tier(memory, columns.memory_time, columns.fast_bytes / unit)
        rss_time, rss = envelope(columns.memory_time, columns.rss_bytes / unit, _POINTS)
        # The process holds more than the tier (code, buffers); its RSS is drawn only if it fits.
        if len(rss) and 0 < rss.max() <= 2.5 * budget:
            memory.plot(rss_time, rss, color=COLOR["rss"], linewidth=0.9, label="process (RSS)")
        _budget_line(memory, budget, f"budget {budget:.4g} {name}")
        memory.set_ylabel(name)
        memory.set_ylim(0, max([budget, *fast, *memory.get_ylim()]) * 1.12)
        step_marks(memory, columns)
        legend(memory, lifted=True)
        edges = np.linspace(columns.begin, max(columns.duration, columns.begin + 1e-9), 361)
        middle = (edges[:-1] + edges[1:]) / 2
        planned = columns.kind("fetch", "plan", "room").rate(edges) / 1e9
        fault = columns.kind("fetch", "fault").rate(edges) / 1e9
        evict = columns.kind("evict").rate(edges) / 1e9
        filled: dict[str, Any] = {"step": "mid", "linewidth": 0}
        for low, high, color, label in (
            (0 * planned, planned, "plan", "fetched ahead"),
            (planned, planned + fault, "fault", "fetched on demand"),
            (0 * evict, -evict, "evict", "evicted (written)"),
        ):
            traffic.fill_between(middle, low, high, color=COLOR[color], label=label, **filled)
        traffic.axhline(0, color=COLOR["muted"], linewidth=0.8)
        top = float(max((planned + fault).max(), 1e-3))
        bottom = float(max(evict.max(), top * 0.15))
        traffic.set_ylim(-bottom * 1.1, top * 1.1)
        traffic.yaxis.set_major_formatter(lambda y, _: f"{abs(y):g}")
        traffic.set_ylabel("GB/s\nout  |  in")
        legend(traffic)
        share = columns.stalls.share(edges) * 100
        waiting.fill_between(middle, share, color=COLOR["stall"], **filled)
        waiting.set_ylim(0, 100)
        waiting.set_yticks([0, 50, 100])
        waiting.set_ylabel("waiting\n% of time")
        time_axis(waiting, columns.begin, columns.duration)

    return svg(draw, height=6.4, name="run")


def timeline_figure(columns: Columns, step: int) -> str:
    """Return one step in detail: phases, stalls, transfers by cause, and fast-tier bytes."""
    begin, end = columns.steps[step]
    width = max(end - begin, 1e-9)
    unit, name = unit_of(max(columns.log.budget, 1))
    budget = columns.log.budget / unit
    scale, time_name = (1e3, "ms") if width < 10 else (1.0, "s")

    def draw(figure: Figure) -> None:
        lanes, memory = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [5, 2.4], "hspace": 0.08}
        )
        rows = (
            ("waiting", columns.stalls, "stall"),
            ("fetched on demand", columns.kind("fetch", "fault"), "fault"),
            ("fetched ahead", columns.kind("fetch", "plan", "room"), "plan"),
            ("evicted (written)", columns.kind("evict"), "evict"),
        )
        _phase_lane(lanes, columns, step, begin, scale, at=len(rows))
        for lane, (_, transfers, color) in enumerate(reversed(rows)):
            _bars(lanes, transfers.within(begin, end), lane, color, begin, width, scale)
        names = [label for label, _, _ in reversed(rows)]
        lanes.set_yticks(range(len(rows) + 1), [*names, "phase"])
        lanes.set_ylim(-0.6, len(rows) + 0.6)
        legend(lanes)
        lanes.tick_params(axis="y", length=0)
        lanes.tick_params(axis="x", length=0)
        lanes.grid(False, axis="y")
        inside = (columns.memory_time >= begin) & (columns.memory_time <= end)
        time = (columns.memory_time[inside] - begin) * scale
        _fast_tier(memory, time, columns.fast_bytes[inside] / unit)
        _budget_line(memory, budget)
        memory.set_ylim(0, budget * 1.15)
        memory.set_ylabel(f"fast tier\n{name}")
        memory.set_xlim(0, width * scale)
        memory.set_xlabel(f"{time_name} since the step began")

    return svg(draw, height=3.9, name=f"timeline-{step}")


def steps_figure(steps: Sequence[StepStats]) -> str:
    """Return per step the seconds, split into stalls and the rest, the bytes, and, if any step had
    a prediction, block-order accuracy and the share of wasted prefetch."""
    import pandas as pd

    size = round_up(max(1.0, len(steps) / _BARS))  # steps that a bar averages, in long runs
    frame = pd.DataFrame(list(steps))
    groups = frame.groupby(frame.index // size)
    mean, bar = groups.mean(), 0.82 * size
    position, stall, seconds = mean["step"], mean["stall_s"], mean["seconds"]
    read, written, waste = (mean[name] for name in ("bytes_in", "bytes_out", "wasted_bytes"))
    scored = 100 * groups["accuracy"].agg(["mean", "min", "max"]).dropna()
    factor, time_name = (1e3, "ms") if seconds.max() < 1 else (1.0, "s")
    unit, bytes_name = unit_of(max(1, int(max(read.max(), written.max()))))
    ratios = [1.25, 1, 0.7] if len(scored) else [1.25, 1]

    def draw(figure: Figure) -> None:
        times, moved, *predicted = figure.subplots(
            len(ratios), 1, sharex=True, gridspec_kw={"height_ratios": ratios, "hspace": 0.16}
        )
        busy = np.maximum(seconds - stall, 0) * factor
        times.bar(position, busy, bar, color=COLOR["compute"], label=_BUSY)
        times.bar(position, stall * factor, bar, busy, color=COLOR["stall"], label="waiting")
        times.set_ylabel(time_name)
        times.set_ylim(0, float(seconds.max()) * factor * 1.22)
        used = np.maximum(read - waste, 0) / unit
        lost = read / unit - used
        moved.bar(position, used, bar, color=COLOR["plan"], label="read and used")
        moved.bar(position, lost, bar, used, color=COLOR["fault"], label="wasted prefetch")
        moved.bar(position, -written / unit, bar, color=COLOR["evict"], label="written")
        moved.axhline(0, color=COLOR["muted"], linewidth=0.8)
        top, low = read.max() / unit, written.max() / unit
        top = top or float(not low)  # a nonempty axis even if nothing moved
        moved.set_ylim(-max(low, top * 0.1) * 1.1, max(top, low * 0.1) * 1.4)
        moved.yaxis.set_major_formatter(lambda y, _: f"{abs(y):g}")
        moved.set_ylabel(f"{bytes_name}\nout  |  in")
        for axes in predicted:
            x, shade = position[scored.index], {"color": COLOR["compute"], "linewidth": 0}
            axes.fill_between(x, scored["min"], scored["max"], alpha=0.22, **shade)
            axes.plot(x, scored["mean"], ".-", color=COLOR["compute"], label="order predicted")
            wasted = 100 * waste / mean["prefetched_bytes"].clip(lower=1)
            axes.plot(position, wasted, color=COLOR["fault"], label="prefetch wasted")
            axes.set_ylim(-3, 103)
            axes.set_ylabel("%")
        for axes in figure.axes:
            legend(axes)
        _step_axis(figure.axes[-1], steps, size)

    return svg(draw, height=1.7 + 1.3 * len(ratios), name="steps")


def _fast_tier(axes: Axes, time: Floats, fast: Floats) -> Floats:
    """Draw the fast tier's bytes over time; return the downsampled values."""
    time, fast = envelope(time, fast, _POINTS)
    axes.fill_between(time, fast, step="post", color=COLOR["fast"], alpha=0.30, linewidth=0)
    axes.step(time, fast, where="post", color=COLOR["fast"], linewidth=1.0, label="fast tier")
    return fast


def _budget_line(axes: Axes, budget: float, label: str = "") -> None:
    axes.axhline(budget, color=COLOR["budget"], linewidth=1.4, linestyle=(0, (5, 3)))
    axes.annotate(
        label,
        (1, budget),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=COLOR["budget"],
        fontweight="bold",
    )


def _phase_lane(
    axes: Axes, columns: Columns, step: int, begin: float, scale: float, at: int
) -> None:
    for name in PHASES:
        bars = [
            ((phase.start - begin) * scale, (phase.end - phase.start) * scale)
            for phase in columns.log.phases
            if (phase.name, phase.step) == (name, step)
        ]
        axes.broken_barh(bars, (at - 0.36, 0.72), color=COLOR[name], label=name)


def _bars(
    axes: Axes, spans: Spans, lane: int, color: str, begin: float, width: float, scale: float
) -> None:
    merged = spans.merged(width / 1500)
    # Bars below a minimum width would be invisible; they are drawn at that width.
    length = np.maximum(merged.end - merged.start, width / 1500)
    axes.broken_barh(
        list(zip((merged.start - begin) * scale, length * scale, strict=True)),
        (lane - 0.36, 0.72),
        color=COLOR[color],
        linewidth=0,
    )


def _step_axis(axes: Axes, steps: Sequence[StepStats], size: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=14, integer=True))
    axes.set_xlim(steps[0].step - 0.6, steps[-1].step + 0.6)
    axes.set_xlabel("step" if size == 1 else f"step (each bar or point: the mean of {size} steps)")


def step_caption(step: StepStats) -> str:
    """Return the caption of a step's timeline."""
    waited = format_seconds(step.stall_s)
    return f"step {step.step}: {format_seconds(step.seconds)}, {waited} of it waiting"
