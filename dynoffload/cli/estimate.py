"""``dynoffload estimate``: predicts the memory and time of training under a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dynoffload.cli.app import app, say_note, stdout
from dynoffload.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from dynoffload.estimation import Estimate


@app.command()
def estimate(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_FACTORY",
            help="MODULE:FUNCTION or FILE.py:FUNCTION that returns (model, optimizer, batches).",
        ),
    ],
    budget: Annotated[
        list[str],
        typer.Option(help="Bytes of fast memory, e.g. 8GiB or 500MB; may be given repeatedly."),
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="repeat, as a session does until it has learned a pilot; pilot, or on-demand."
        ),
    ] = "repeat",
    spill_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where the spill file would lie.", show_default=False),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            exists=True,
            help="What 'dynoffload experiment simulation --json' found on this machine.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Estimate training under a budget: memory by tier, time of a step, and what bounds it.

    The function builds the model, in memory or on the meta device, its optimizer and a few batches.
    It may also return a loss function of (output, batch). Forward and backward run on up to six
    batches. A mapping is passed to forward by name, a tuple by position (with a loss function, as
    many items as forward takes), anything else as the one argument. Nothing is trained. Exits with
    code 1 if none of the budgets is large enough.

    Example:

    ```
    $ dynoffload estimate train.py:build --budget 2GiB --budget 4GiB
    ```
    """
    from dynoffload.config import OffloadConfig
    from dynoffload.estimation import estimates
    from dynoffload.estimation.estimate import check_options
    from dynoffload.estimation.factory import job_of
    from dynoffload.pilot.progress import progress_bar

    sizes = [parse_bytes(one, "--budget") for one in budget]
    config = OffloadConfig(policy=policy)
    check_options(config)
    with progress_bar(True) as report:
        report("building the model")
        job = job_of(factory)
        found = estimates(
            job.model,
            job.batches,
            budgets=sizes,
            optimizer=job.optimizer,
            loss=job.loss,
            config=config,
            spill_dir=spill_dir,
            calibration=calibration,
            report=report,
        )
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    else:
        _show(dict(zip(budget, found, strict=True)), policy)
    if not any(one.feasible for one in found):
        raise typer.Exit(1)


def _show(asked: Mapping[str, Estimate], policy: str) -> None:
    """Print the estimates, one column per budget as the user wrote it."""
    found = list(asked.values())
    first = found[0]
    stdout().print(
        f"[bold]{first.model}[/]: {format_bytes(first.parameters)} of parameters and buffers, "
        f"{format_bytes(first.gradients)} of gradients, {format_bytes(first.optimizer)} of "
        f"optimizer state; a step saves {format_bytes(first.activations)} for backward, and needs "
        f"{format_bytes(first.temporaries)} of temporaries beside any budget. "
        f"A plain step: {format_seconds(first.plain_s)}. Estimated for policy={policy!r}.",
        highlight=False,
    )
    table = Table("budget", *asked, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cell in _ROWS.items():
        table.add_row(name, *(cell(one) if one.feasible else "" for one in found))
    table.add_row("", *("" if one.feasible else _too_small(one) for one in found))
    stdout().print(table)
    refused = [one for one in found if not one.feasible]
    if refused:  # the reasons differ only in their budget
        say_note(max(refused, key=lambda one: one.budget).reason)
    for note in dict.fromkeys(note for one in found for note in one.assumptions):
        say_note(note)


def _too_small(one: Estimate) -> str:
    return f"too small; {format_bytes(one.least)} is enough" if one.least else "too small"


def _step(one: Estimate) -> str:
    if not one.timed:
        return "not estimated"
    times = one.step_s, one.step_low_s, one.step_high_s
    step, low, high = (format_seconds(seconds) for seconds in times)
    return f"{step} ({low} to {high})"


def _bound(one: Estimate) -> str:
    if not one.timed:
        return ""
    return "nothing, it fits" if one.resident else _BOUNDS[one.bound]


_BOUNDS = {
    "compute": "compute",
    "own work": "overhead",
    "reads": "disk reads",
    "writes": "disk writes",
}
_ROWS: dict[str, Callable[[Estimate], str]] = {
    "fast memory": lambda one: format_bytes(one.fast_peak),
    "spill file": lambda one: format_bytes(one.file_peak),
    "read in a step": lambda one: format_bytes(int(one.bytes_in)) if one.timed else "",
    "written in a step": lambda one: format_bytes(int(one.bytes_out)) if one.timed else "",
    "a step": _step,
    "overhead of dynoffload": lambda one: format_seconds(one.own_s) if one.timed else "",
    "waiting for the disk": lambda one: format_seconds(one.stall_s) if one.timed else "",
    "bound by": _bound,
}
