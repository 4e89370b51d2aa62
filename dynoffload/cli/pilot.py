"""``dynoffload pilot train`` and ``pilot eval``: train and score a pilot offline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dynoffload.cli.app import EPILOG, app, say_wrote, stdout
from dynoffload.errors import PilotError
from dynoffload.units import format_seconds, parse_bytes

if TYPE_CHECKING:
    from dynoffload.pilot.train import Evaluation

commands = typer.Typer(
    help="Train a pilot from traces, and score it on held-out ones.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(commands, name="pilot")


COLUMNS = ("order", "varying", "whole order")
LEGEND = (
    "order: share of the blocks in the right order (1 - edit distance). Varying: the same over the "
    "blocks that vary. Whole order: share of steps without an error. The pilot learns from each "
    "step once it is scored."
)
PREDICTORS = {
    "pilot": "pilot",
    "last order": "repeat-last",
    "most frequent": "most frequent order",
}
"""Row of an evaluation -> its name in the table."""

Traces = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="What 'dynoffload profile' wrote.")
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Processes on this machine; by default one per core.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]


@commands.command()
def train(
    traces: Traces,
    out: Annotated[Path, typer.Option("--out", "-o", help="The .pilot file to write.")],
    budget: Annotated[
        str | None,
        typer.Option(help="Cut blocks that fit in this much fast memory, e.g. 8GiB."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same pilot.")] = 0,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Train a pilot from a directory of traces.

    The same traces and seed give the same file, for any number of processes.

    Example:

    ```
    $ dynoffload pilot train traces/ -o moe.pilot
    ```
    """
    from dynoffload.pilot.train import train_pilot

    out.parent.mkdir(parents=True, exist_ok=True)
    limit = None if budget is None else parse_bytes(budget, "--budget")
    result = train_pilot(traces, budget=limit, seed=seed, jobs=jobs or -1)
    result.pilot.save(out)
    facts = {"train_samples": result.train_samples, "seconds": result.seconds}
    _show(
        f"Pilot trained on {traces}, scored on samples held out", facts, result.evaluation, as_json
    )
    say_wrote(out)


@commands.command("eval")
def evaluate(
    pilot: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A .pilot file.")],
    traces: Traces,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Score a pilot on a directory of traces that it was not trained on.

    Example:

    ```
    $ dynoffload pilot eval moe.pilot held-out/ --json
    ```
    """
    from dynoffload.pilot.pilot import Pilot
    from dynoffload.pilot.train import evaluate_pilot

    loaded = Pilot.load(pilot)
    try:
        evaluation = evaluate_pilot(loaded, traces, jobs=jobs or -1)
    except PilotError as error:
        raise PilotError(f"{pilot} and {traces}: {error}") from error
    _show(f"{pilot.name} on {traces}", {}, evaluation, as_json)


def numbers_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return the scores by predictor, and the latency; NaN, which JSON lacks, becomes ``None``."""
    scores = {
        who.replace(" ", "_"): {
            name: None if math.isnan(value) else value for name, value in row.to_json().items()
        }
        for who, row in evaluation.rows().items()
    }
    return {
        **scores,
        "one_ahead": evaluation.one_ahead,
        "latency_s": evaluation.latency_s,
        "slow_s": evaluation.slow_s,
        "trained_on": evaluation.trained_on,
    }


def _show(
    title: str,
    facts: Mapping[str, int | float],
    evaluation: Evaluation,
    as_json: bool,
) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, **numbers_of(evaluation)}, indent=2))
        return
    table = Table(title=title, title_justify="left")
    table.add_column("predictor")
    for header in (*COLUMNS, "samples"):
        table.add_column(header, justify="right")
    for who, row in evaluation.rows().items():
        shares = (row.block_order_accuracy, row.varying_order, row.whole_order)
        shown = ("–" if math.isnan(share) else f"{share:.1%}" for share in shares)
        table.add_row(PREDICTORS[who], *shown, str(row.samples))
    console = stdout()
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    seconds = facts.get("seconds")
    took = "" if seconds is None else f"; trained in {format_seconds(seconds)}"
    console.print(
        f"updated during the step, the pilot predicts the next block {evaluation.one_ahead:.1%} "
        "of the time",
        highlight=False,
    )
    latency, slow = format_seconds(evaluation.latency_s), format_seconds(evaluation.slow_s)
    console.print(f"one prediction takes {latency}, one of twenty {slow}{took}", highlight=False)
    if evaluation.trained_on:
        console.print(
            f"{evaluation.trained_on} of these {evaluation.pilot.samples} samples were used to "
            "train this pilot, so its scores are too good: score it on traces of other samples",
            style="yellow",
            highlight=False,
        )
    pilot, last = evaluation.pilot, evaluation.last_order
    if not pilot.block_order_accuracy > last.block_order_accuracy:
        console.print(
            "here the pilot is no better than repeating the last order: record more steps, or "
            "leave it out; a session lets it steer only while it does better",
            highlight=False,
        )
