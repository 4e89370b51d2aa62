"""Table that compares runs, for terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynoffload.reporting.summary import summarize
from dynoffload.telemetry import RunLog
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

NONE = "–"


@dataclass(frozen=True)
class ComparisonRow:
    """One run of a comparison; ``None`` if a number does not exist (plain PyTorch moves no bytes).

    Attributes:
        name: what ran, as shown to the reader.
        step_s: median step time in seconds, after warm-up.
        stall_s: median seconds stalled per step.
        stalls: median number of stalls per step.
        bytes_in, bytes_out: median bytes per step.
        wasted_share: wasted share of all prefetched bytes, 0 to 1.
        accuracy: mean block-order accuracy, 0 to 1.
        peak_fast_bytes: most bytes in fast memory.
        losses_equal: whether each loss equals plain PyTorch's bit for bit.
        wasted_bytes: median prefetched bytes per step that were never used.
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
        """Return the row of ``log``; all but the peak leave out its first ``warmup`` steps."""
        numbers: dict[str, Any] = {
            key: None if math.isnan(value) else value
            for key, value in vars(summarize(log, warmup=warmup)).items()
            if key in cls.__dataclass_fields__
        }
        return cls(name, losses_equal=losses_equal, **numbers)


def comparison_table(rows: Sequence[ComparisonRow], *, title: str, budget: int) -> Table:
    """Return a table with a column per run; step times are relative to the first, the baseline.

    Args:
        rows: the runs; the first is the baseline, which has no budget.
        title: above the table.
        budget: bytes; a peak above it is shown in red.
    """
    from rich.table import Table

    caption = f"budget {format_bytes(budget)}; medians per step after warm-up"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    base = rows[0]
    table.add_column("a step")
    for row in rows:
        table.add_column(row.name, justify="right")
    for label, cell in (
        ("step time", lambda row: format_seconds(row.step_s)),
        (f"vs {base.name}", lambda row: f"{row.step_s / base.step_s:.2f}×"),
        ("stalled", lambda row: NONE if row.stall_s is None else format_seconds(row.stall_s)),
        ("stalls", lambda row: NONE if row.stalls is None else f"{row.stalls:.0f}"),
        ("read", lambda row: _bytes(row.bytes_in)),
        ("written", lambda row: _bytes(row.bytes_out)),
        ("wasted prefetch", lambda row: _bytes(row.wasted_bytes)),
        ("wasted share", lambda row: _share(row.wasted_share)),
        ("order predicted", lambda row: _share(row.accuracy)),
        ("peak memory", lambda row: _peak(row, row is not base and budget)),
        ("same losses", lambda row: _EQUAL[row.losses_equal]),
    ):
        table.add_row(label, *map(cell, rows))
    return table


_EQUAL = {None: NONE, True: "[green]yes[/]", False: "[bold red]NO[/]"}


def _peak(row: ComparisonRow, budget: int) -> str:
    word = _bytes(row.peak_fast_bytes)
    return f"[bold red]{word}[/]" if 0 < budget < (row.peak_fast_bytes or 0) else word


def _bytes(count: int | None) -> str:
    return NONE if count is None else format_bytes(count)


def _share(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"
