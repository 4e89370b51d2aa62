"""``dynoffload report``: makes the HTML page and the Perfetto trace of a logged run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dynoffload.cli.app import app, say_wrote, stderr, stdout


@app.command()
def report(
    runlog: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="A .runlog.json or .runlog.json.gz file."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page; beside the log by default.", show_default=False
        ),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="The trace for ui.perfetto.dev; beside the page by default."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the numbers of the run as JSON; writes only the files that are named.",
        ),
    ] = False,
) -> None:
    """Make an HTML page and a Perfetto trace of a logged run.

    The page needs no network; open the trace at ui.perfetto.dev.

    Example:

    ```
    $ dynoffload report out/run.runlog.json.gz -o run.html
    ```
    """
    from dynoffload.reporting import write_perfetto, write_report
    from dynoffload.reporting.summary import headlines, summarize, verdict
    from dynoffload.telemetry import RunLog

    with stderr().status("reading the log"):
        log = RunLog.load(runlog)
    page = out or (None if as_json else runlog.with_name(runlog.name.split(".")[0] + ".html"))
    trace = perfetto or (None if page is None else page.with_suffix(".perfetto.json.gz"))
    with stderr().status("drawing"):
        if page is not None:
            write_report(log, page)
        if trace is not None:
            write_perfetto(log, trace)
    if as_json:
        numbers: dict[str, Any] = asdict(summarize(log)) if log.steps else {"steps": 0}
        clean = {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in numbers.items()
        }
        made = {"page": page, "perfetto": trace}
        files = {kind: str(path) for kind, path in made.items() if path is not None}
        typer.echo(json.dumps({**clean, "budget": log.budget, **files}, indent=2))
        return
    console = stdout()
    console.print(verdict(log), highlight=False, markup=False)
    table = Table(show_header=False, box=None)
    for card in headlines(log):
        table.add_row(card.label, f"[bold]{card.value}[/]", f"[dim]{card.meaning}[/]")
    console.print(table)
    say_wrote(*(path for path in (page, trace) if path is not None))
