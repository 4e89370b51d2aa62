"""The figures of the report, one function per figure; each returns an SVG element.

Numbers come from ``columns`` and ``summary``, the look of axes and colours from ``canvas``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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
from dynoffload.reporting.columns import Columns, Spans, envelope
from dynoffload.telemetry import PHASES, RunLog, StepStats
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 700  # bins of a curve over the whole run
_BARS = 120  # bars of a figure over steps
_BUSY = "computing and hooks"  # nothing tells the two apart


def memory_figure(log: RunLog, columns: Columns) -> str:
    """Return the fast tier's bytes, as far as recorded, against the budget line, with the RSS."""
    unit, name = unit_of(max(log.budget, 1))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        time, fast = envelope(columns.memory_time, columns.fast_bytes / unit, _POINTS)
        axes.fill_between(time, fast, step="post", color=COLOR["fast"], alpha=0.30, linewidth=0)
        axes.step(time, fast, where="post", color=COLOR["fast"], linewidth=1.0, label="fast tier")
        rss_time, rss = envelope(columns.memory_time, columns.rss_bytes / unit, _POINTS)
        # The process holds more than the tier (code, buffers); shown where it does not dwarf it.
        if len(rss) and 0 < rss.max() <= 2.5 * log.budget / unit:
            axes.plot(rss_time, rss, color=COLOR["rss"], linewidth=0.9, label="whole process (RSS)")
        axes.axhline(log.budget / unit, color=COLOR["budget"], linewidth=1.4, linestyle=(0, (5, 3)))
        axes.annotate(
            f"budget {log.budget / unit:.4g} {name}",
            (1, log.budget / unit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=COLOR["budget"],
            fontweight="bold",
        )
        axes.set_ylabel(name)
        axes.set_ylim(0, max([log.budget / unit, *fast, *axes.get_ylim()]) * 1.12)
        time_axis(axes, columns.begin, columns.duration)
        step_marks(axes, columns)
        legend(axes, lifted=True)

    return svg(draw, height=3.1, name="memory")


def traffic_figure(columns: Columns) -> str:
    """Return the bandwidth in both directions, as far as recorded, and when the step waited."""

    def draw(figure: Figure) -> None:
        traffic, waiting = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1], "hspace": 0.12}
        )
        edges = np.linspace(columns.begin, max(columns.duration, columns.begin + 1e-9), 361)
        middle = (edges[:-1] + edges[1:]) / 2
        planned = columns.kind("fetch", "plan", "room").rate(edges) / 1e9
        fault = columns.kind("fetch", "fault").rate(edges) / 1e9
        evict = columns.kind("evict").rate(edges) / 1e9
        for low, high, color, label in (
            (0 * planned, planned, "plan", "fetched ahead"),
            (planned, planned + fault, "fault", "fetched on demand"),
            (0 * evict, -evict, "evict", "evicted (written)"),
        ):
            traffic.fill_between(
                middle,
                low,
                high,
                step="mid",
                color=COLOR[color],
                alpha=0.85,
                linewidth=0,
                label=label,
            )
        traffic.axhline(0, color=COLOR["muted"], linewidth=0.8)
        top = float(max((planned + fault).max(), 1e-3))
        bottom = float(max(evict.max(), top * 0.15))
        traffic.set_ylim(-bottom * 1.1, top * 1.1)
        traffic.yaxis.set_major_formatter(lambda y, _: f"{abs(y):g}")
        traffic.set_ylabel("GB/s\nout  |  in")
        legend(traffic, lifted=True)
        share = columns.stalls.share(edges) * 100
        waiting.fill_between(middle, share, step="mid", color=COLOR["stall"], linewidth=0)
        waiting.set_ylim(0, 100)
        waiting.set_yticks([0, 50, 100])
        waiting.set_ylabel("waiting\n% of time")
        time_axis(waiting, columns.begin, columns.duration)
        step_marks(traffic, columns)

    return svg(draw, height=3.9, name="traffic")


def timeline_figure(log: RunLog, columns: Columns, step: int) -> str:
    """Return one step in detail: phases, waits, transfers by cause, and the fast tier's bytes."""
    begin, end = columns.step_begin[step], columns.step_end[step]
    width = max(end - begin, 1e-9)
    unit, name = unit_of(max(log.budget, 1))
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
        _phase_lane(lanes, columns, step, begin, scale, width, at=len(rows))
        for lane, (_, transfers, color) in enumerate(reversed(rows)):
            _bars(lanes, transfers.within(begin, end), lane, color, begin, width, scale)
        names = [label for label, _, _ in reversed(rows)]
        lanes.set_yticks(range(len(rows) + 1), [*names, "phase"])
        lanes.set_ylim(-0.6, len(rows) + 0.95)
        lanes.tick_params(axis="y", length=0)
        lanes.tick_params(axis="x", length=0)
        lanes.grid(False, axis="y")
        inside = (columns.memory_time >= begin) & (columns.memory_time <= end)
        time, fast = envelope(
            columns.memory_time[inside], columns.fast_bytes[inside] / unit, _POINTS
        )
        time = (time - begin) * scale
        memory.fill_between(time, fast, step="post", color=COLOR["fast"], alpha=0.30, linewidth=0)
        memory.step(time, fast, where="post", color=COLOR["fast"], linewidth=1.0)
        memory.axhline(
            log.budget / unit, color=COLOR["budget"], linewidth=1.2, linestyle=(0, (5, 3))
        )
        memory.set_ylim(0, log.budget / unit * 1.15)
        memory.set_ylabel(f"fast tier\n{name}")
        memory.set_xlim(0, width * scale)
        memory.set_xlabel(f"{time_name} since the step began")

    return svg(draw, height=3.9, name=f"timeline-{step}")


def steps_figure(steps: Sequence[StepStats]) -> str:
    """Return seconds per step, split into waiting and all else, and bytes per step."""
    groups = _groups(steps)
    position = np.array([_mean(group, lambda s: s.step) for group in groups])
    bar = 0.82 * (len(steps) / len(groups))
    stall = np.array([_mean(group, lambda s: s.stall_s) for group in groups])
    seconds = np.array([_mean(group, lambda s: s.seconds) for group in groups])
    factor, time_name = (1e3, "ms") if seconds.max(initial=0) < 1 else (1.0, "s")
    columns = {
        name: np.array([_mean(group, lambda s, n=name: getattr(s, n)) for group in groups])  # type: ignore[misc]
        for name in ("bytes_in", "bytes_out", "wasted_bytes")
    }
    unit, bytes_name = unit_of(
        max(1, int(max(columns["bytes_in"].max(), columns["bytes_out"].max())))
    )

    def draw(figure: Figure) -> None:
        times, moved = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [1.25, 1], "hspace": 0.16}
        )
        busy = np.maximum(seconds - stall, 0) * factor
        times.bar(position, busy, bar, color=COLOR["compute"], label=_BUSY)
        times.bar(position, stall * factor, bar, busy, color=COLOR["stall"], label="waiting")
        times.set_ylabel(time_name)
        times.set_ylim(0, float(seconds.max()) * factor * 1.22)
        legend(times)
        kept = columns["bytes_in"] - np.minimum(columns["wasted_bytes"], columns["bytes_in"])
        waste = columns["bytes_in"] - kept
        moved.bar(position, kept / unit, bar, color=COLOR["plan"], label="read and used")
        moved.bar(
            position, waste / unit, bar, kept / unit, color=COLOR["fault"], label="wasted prefetch"
        )
        moved.bar(
            position, -columns["bytes_out"] / unit, bar, color=COLOR["evict"], label="written"
        )
        moved.axhline(0, color=COLOR["muted"], linewidth=0.8)
        top, low = columns["bytes_in"].max() / unit, columns["bytes_out"].max() / unit
        top = top or float(not low)  # where nothing moved there is an axis still
        moved.set_ylim(-max(low, top * 0.1) * 1.1, max(top, low * 0.1) * 1.4)
        moved.yaxis.set_major_formatter(lambda y, _: f"{abs(y):g}")
        moved.set_ylabel(f"{bytes_name}\nout  |  in")
        legend(moved)
        _step_axis(moved, steps)

    return svg(draw, height=4.3, name="steps")


def accuracy_figure(steps: Sequence[StepStats]) -> str:
    """Return block-order accuracy and the share of wasted prefetch per step."""
    groups = _groups(steps)
    position = np.array([_mean(group, lambda s: s.step) for group in groups])
    scored = [[s.accuracy for s in group if not math.isnan(s.accuracy)] for group in groups]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        at = [i for i, values in enumerate(scored) if values]
        x = position[at]
        mean = np.array([np.mean(scored[i]) for i in at]) * 100
        if len(groups) < len(steps):
            low = [min(scored[i]) * 100 for i in at]
            high = [max(scored[i]) * 100 for i in at]
            axes.fill_between(
                x, low, high, color=COLOR["compute"], alpha=0.22, linewidth=0, label="worst to best"
            )
        axes.plot(
            x,
            mean,
            color=COLOR["compute"],
            linewidth=1.6,
            marker="o" if len(groups) <= 60 else "",
            markersize=3,
            label="order predicted",
        )
        waste = [
            100 * sum(s.wasted_bytes for s in g) / max(1, sum(s.prefetched_bytes for s in g))
            for g in groups
        ]
        axes.plot(position, waste, color=COLOR["fault"], linewidth=1.2, label="prefetch wasted")
        axes.set_ylim(-3, 103)
        axes.set_yticks([0, 25, 50, 75, 100])
        axes.set_ylabel("%")
        _step_axis(axes, steps)
        legend(axes)

    return svg(draw, height=2.5, name="accuracy")


def _mean(group: Sequence[StepStats], value: Callable[[StepStats], float]) -> float:
    """Return the mean of ``value`` over the steps of ``group``."""
    return sum(float(value(step)) for step in group) / len(group)


def _groups(steps: Sequence[StepStats]) -> list[Sequence[StepStats]]:
    """Return ``steps`` one by one, or in equal groups where they are more than bars can show."""
    size = round_up(max(1.0, len(steps) / _BARS))
    return [steps[i : i + size] for i in range(0, len(steps), size)]


def _phase_lane(
    axes: Axes, columns: Columns, step: int, begin: float, scale: float, width: float, at: int
) -> None:
    outside: list[tuple[float, str]] = []  # where, which: too narrow to hold their names
    for name in PHASES:
        spans, longest, named = columns.phases[name], (0.0, 0.0), False
        for index in np.flatnonzero(columns.phase_steps[name] == step):
            start, end = spans.start[index] - begin, spans.end[index] - begin
            axes.broken_barh(
                [(start * scale, (end - start) * scale)], (at - 0.36, 0.72), color=COLOR[name]
            )
            if (end - start) / width > 0.015 * len(name):
                middle = (start + end) / 2 * scale
                axes.text(middle, at - 0.03, name, ha="center", va="center", color=COLOR["paper"])
                named = True
            longest = max(longest, (end - start, (start + end) / 2))
        apart = all(abs(longest[1] - where) > 0.1 * width for where, _ in outside)
        if longest[0] > 0 and not named and apart:
            outside.append((longest[1], name))
    for where, name in outside:
        side = "right" if where > 0.9 * width else "left" if where < 0.1 * width else "center"
        x = {"right": width, "left": 0.0, "center": where}[side] * scale
        axes.text(x, at + 0.42, name, ha=side, va="bottom", color=COLOR[name])


def _bars(
    axes: Axes, spans: Spans, lane: int, color: str, begin: float, width: float, scale: float
) -> None:
    merged = spans.merged(width / 1500)
    # A bar narrower than a hair would vanish; it is drawn a hair wide.
    length = np.maximum(merged.end - merged.start, width / 1500)
    axes.broken_barh(
        list(zip((merged.start - begin) * scale, length * scale, strict=True)),
        (lane - 0.36, 0.72),
        color=COLOR[color],
        linewidth=0,
    )


def _step_axis(axes: Axes, steps: Sequence[StepStats]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=14, integer=True))
    axes.set_xlim(steps[0].step - 0.6, steps[-1].step + 0.6)
    size = round_up(max(1.0, len(steps) / _BARS))
    axes.set_xlabel("step" if size == 1 else f"step (each bar or point: the mean of {size} steps)")


def step_caption(step: StepStats) -> str:
    """Return the line above a step's timeline."""
    waited = format_seconds(step.stall_s)
    return f"step {step.step}: {format_seconds(step.seconds)}, {waited} of it waiting"
