"""Comparison of runs: what a reader weighs them by, and the table of it for terminals.

What it is: one row per run (plain, on-demand, repeat, pilot), its numbers as words, and those
printed by rich; the page of a report shows the same words. What it is not: measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynoffload.reporting.summary import Tone, summarize
from dynoffload.telemetry import RunLog
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

NONE = "–"


@dataclass(frozen=True)
class ComparisonRow:
    """One run of a comparison; ``None`` where a run has no such number (plain PyTorch moves none).

    Attributes:
        name: what ran, as the reader knows it.
        step_s: median seconds of a step after warm-up.
        stall_s: median seconds a step waited.
        stalls: median number of waits of a step.
        bytes_in, bytes_out: median bytes of a step.
        wasted_share: wasted of all prefetched bytes, 0 to 1.
        accuracy: mean block-order accuracy, 0 to 1.
        peak_fast_bytes: most bytes in fast memory.
        losses_equal: whether each loss equals plain PyTorch's bit for bit.
        wasted_bytes: median prefetched bytes of a step that nothing used.
    """

    name: str
    step_s: float
    stall_s: float | None = None
    stalls: float | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    wasted_share: float | None = None
    accuracy: float | None = None
    peak_fast_bytes: int | None = None
    losses_equal: bool | None = None
    wasted_bytes: int | None = None

    @classmethod
    def of(
        cls,
        name: str,
        log: RunLog,
        *,
        losses_equal: bool | None = None,
        warmup: int | None = None,
    ) -> ComparisonRow:
        """Return the row of ``log``, its first ``warmup`` steps left out of all but the peak."""
        summary = summarize(log, warmup=warmup)
        return cls(
            name,
            step_s=summary.step_s,
            stall_s=summary.stall_s,
            stalls=summary.stalls,
            bytes_in=summary.bytes_in,
            bytes_out=summary.bytes_out,
            wasted_share=None if math.isnan(summary.wasted_share) else summary.wasted_share,
            accuracy=None if math.isnan(summary.accuracy) else summary.accuracy,
            peak_fast_bytes=summary.peak_fast_bytes,
            losses_equal=losses_equal,
            wasted_bytes=summary.wasted_bytes,
        )


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, as the page of one of them shows them.

    Attributes:
        title: the heading.
        rows: the runs, the baseline first.
        budget: bytes; a peak that passes it is marked.
        note: how the runs were made, for the reader.

    Raises:
        ValueError: if there is no row.
    """

    title: str
    rows: tuple[ComparisonRow, ...]
    budget: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("a comparison needs at least one row")

    def headers(self) -> list[str]:
        """Return what the numbers of a run are, in the order of `cells`."""
        versus = f"vs {self.rows[0].name}"
        return [
            *("step time", versus, "stalled", "stalls", "read", "written"),
            *("wasted prefetch", "wasted share", "order predicted", "peak memory", "same losses"),
        ]

    def cells(self, row: ComparisonRow) -> list[tuple[str, Tone]]:
        """Return the numbers of ``row`` as words, and how each reads."""
        base = self.rows[0]
        # The baseline runs without a budget.
        over = self.budget is not None and (row.peak_fast_bytes or 0) > self.budget
        equal = {None: (NONE, Tone.PLAIN), True: ("yes", Tone.GOOD), False: ("NO", Tone.BAD)}
        words = (
            format_seconds(row.step_s),
            f"{row.step_s / base.step_s:.2f}×" if base.step_s > 0 else NONE,
            NONE if row.stall_s is None else format_seconds(row.stall_s),
            NONE if row.stalls is None else f"{row.stalls:.0f}",
            _bytes(row.bytes_in),
            _bytes(row.bytes_out),
            _bytes(row.wasted_bytes),
            _share(row.wasted_share),
            _share(row.accuracy),
        )
        peak = _bytes(row.peak_fast_bytes), Tone.BAD if over and row is not base else Tone.PLAIN
        return [*((word, Tone.PLAIN) for word in words), peak, equal[row.losses_equal]]


def comparison_table(
    rows: Sequence[ComparisonRow],
    *,
    title: str = "",
    budget: int | None = None,
    upright: bool = False,
) -> Table:
    """Return ``rows`` as a table; times are compared with the first row, the baseline.

    Args:
        rows: the runs, baseline first.
        title: above the table.
        budget: bytes; a peak that passes it is shown in red.
        upright: put each run in a column: a few runs then fit a terminal of 80 characters.

    Raises:
        ValueError: if there is no row.
    """
    from rich.table import Table

    comparison = Comparison(title, tuple(rows), budget)
    caption = f"budget {format_bytes(budget)}; medians per step after warm-up" if budget else None
    table = Table(
        title=title or None, caption=caption, title_justify="left", caption_justify="left"
    )
    headers = comparison.headers()
    cells = [[_marked(*cell) for cell in comparison.cells(row)] for row in rows]
    if upright:
        table.add_column("a step")
        for row in rows:
            table.add_column(row.name, justify="right")
        for place, header in enumerate(headers):
            table.add_row(header, *(values[place] for values in cells))
        return table
    table.add_column("run")
    for header in headers:
        table.add_column(header, justify="right")
    for row, values in zip(rows, cells, strict=True):
        table.add_row(row.name, *values)
    return table


def _marked(word: str, tone: Tone) -> str:
    style = {Tone.GOOD: "green", Tone.BAD: "bold red"}.get(tone)
    return f"[{style}]{word}[/]" if style else word


def _bytes(count: int | None) -> str:
    return NONE if count is None else format_bytes(count)


def _share(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"
