"""The report of one run: a self-contained HTML page.

`write_report` puts headline numbers (``summary``), figures (``figures``) and tables of a `RunLog`
into one file. It opens offline, follows the browser's light or dark setting, and has no script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.profiler.safefile import write_whole
from dynoffload.reporting import figures, summary
from dynoffload.reporting.columns import Columns
from dynoffload.reporting.perfetto import write_perfetto
from dynoffload.telemetry import RunLog, StepStats
from dynoffload.units import format_bytes, format_seconds

MAX_STEP_ROWS = 200
"""Rows of the page's table of steps; a longer run shows the first and last ones and a note."""
MAX_CHANGES = 24
_KINDS = {"equal": "match", "replace": "swap", "delete": "extra", "insert": "missing"}


@dataclass(frozen=True)
class ReportFiles:
    """Files that `write_run` wrote: the page, the Perfetto trace, and the log they came from."""

    page: Path
    perfetto: Path
    log: Path


def write_run(log: RunLog, path: str | Path) -> ReportFiles:
    """Write the page to ``path``, and next to it the Perfetto trace and the run log.

    For ``out/run.html`` these are ``out/run.perfetto.json.gz`` and ``out/run.runlog.json.gz``.

    Raises:
        ConfigError: ``path`` is a directory, or its directory cannot be made.
    """
    page = Path(path)
    if page.is_dir():
        raise ConfigError(f"{page} is a directory: name the page to write, {page / 'run.html'}")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no report can be written to {page}: {error.strerror}; name another place"
        ) from error
    files = ReportFiles(
        page, page.with_suffix(".perfetto.json.gz"), page.with_suffix(".runlog.json.gz")
    )
    log.save(files.log)
    write_perfetto(log, files.perfetto)
    write_report(log, page)
    return files


def write_report(log: RunLog, path: str | Path) -> Path:
    """Write the HTML page of ``log`` to ``path`` and return the path.

    The page has 100 KiB to a few MiB for runs of any length: curves keep their extremes in a
    bounded number of points, and in long runs a bar averages several steps.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _page(log).encode())
    return path


def _page(log: RunLog) -> str:
    import jinja2
    from markupsafe import Markup

    columns = Columns.of(log)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dynoffload.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=format_bytes,
        seconds=format_seconds,
        percent=lambda share: "–" if math.isnan(share) else f"{share:.1%}",
    )
    shown: dict[str, Any] = {}
    if log.memory:
        shown["run"] = Markup(figures.run_figure(columns))
    if log.steps:
        shown["steps"] = Markup(figures.steps_figure(log.steps))
    timelines = [
        (
            title,
            figures.step_caption(step),
            Markup(figures.timeline_figure(columns, step.step)),
        )
        for title, step in _notable_steps(log, columns)
    ]
    return environment.get_template("report.html.j2").render(
        log=log,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        verdict=summary.verdict(log),
        missing=summary.left_out(log),
        headlines=summary.headlines(log),
        figures=shown,
        timelines=timelines,
        phases=summary.phase_costs(columns),
        regions=summary.region_costs(log),
        worst=_worst_predicted(log),
        rows=_step_rows(log.steps),
        left_out=max(0, len(log.steps) - MAX_STEP_ROWS),
    )


def _notable_steps(log: RunLog, columns: Columns) -> Iterator[tuple[str, StepStats]]:
    """Yield the step of median time, and the one that stalled longest, after warm-up."""
    known = [s for s in log.steps[summary.warmup_of(log.steps) :] if s.step in columns.steps]
    if not known:
        return
    middle = sorted(known, key=lambda s: (s.seconds, s.step))[(len(known) - 1) // 2]
    yield "A typical step", middle
    worst = max(known, key=lambda s: (s.stall_s, s.seconds))
    if worst.step != middle.step:
        yield "The step that waited longest", worst


def _worst_predicted(log: RunLog) -> dict[str, Any] | None:
    """Return where the worst predicted step differs from its prediction; None without any."""
    accuracy = {step.step: step.accuracy for step in log.steps}
    predicted = [
        (share, blocks)
        for blocks in log.blocks
        if blocks.predicted is not None
        and not math.isnan(share := accuracy.get(blocks.step, math.nan))
    ]
    if not predicted:
        return None
    share, worst = min(predicted, key=lambda one: (one[0], one[1].step))
    edits = align(worst.predicted or (), worst.actual)
    kinds = [kind for kind, *_ in edits]
    changes = [(place, *edit) for place, edit in enumerate(edits) if edit[0] != "match"]
    return {
        "step": worst.step,
        "accuracy": share,
        "count": {kind: kinds.count(kind) for kind in _KINDS.values()},
        "changes": changes[:MAX_CHANGES],
        "changes_left_out": max(0, len(changes) - MAX_CHANGES),
    }


def align(
    predicted: Sequence[str], actual: Sequence[str]
) -> list[tuple[str, str | None, str | None]]:
    """Return the alignment of ``predicted`` to ``actual`` with the fewest changes
    (Levenshtein 1966), as block-order accuracy counts them.

    Each edit is a kind, the predicted block and the actual one; None on the side that has none.
    Kinds: ``"match"``, ``"swap"``, ``"extra"`` (predicted, not run there), ``"missing"`` (run, not
    predicted there).
    """
    from rapidfuzz.distance import Levenshtein

    return [
        (_KINDS[op.tag], left, right)
        for op in Levenshtein.opcodes(predicted, actual)
        for left, right in zip_longest(
            predicted[op.src_start : op.src_end], actual[op.dest_start : op.dest_end]
        )
    ]


def _step_rows(steps: Sequence[StepStats]) -> list[StepStats]:
    if len(steps) <= MAX_STEP_ROWS:
        return list(steps)
    half = MAX_STEP_ROWS // 2
    return [*steps[:half], *steps[-half:]]
