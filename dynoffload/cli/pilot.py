"""``dynoffload pilot train`` and ``pilot eval``: the pilot as an offline job."""

from __future__ import annotations

import enum
import json
import math
import shlex
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


class ModelChoice(str, enum.Enum):
    """What learns."""

    AUTO = "auto"
    LIGHTGBM = "lightgbm"
    MARKOV = "markov"
    SEQUENCE = "sequence"


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
    model: Annotated[
        ModelChoice, typer.Option(help="What learns; auto takes what predicts best.")
    ] = ModelChoice.AUTO,
    budget: Annotated[
        str | None,
        typer.Option(help="Cut blocks that fit in this much fast memory, e.g. 8GiB."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same pilot.")] = 0,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Train a pilot from a directory of traces.

    Beside FILE a model card, FILE.card.md, says what the pilot was made of, how good it is and
    where it is not. The same traces and seed give the same file, however many processes work on it.

    Example:

    ```
    $ dynoffload pilot train traces/ -o moe.pilot --model auto
    ```
    """
    from dynoffload.pilot.model_card import card_path, model_card
    from dynoffload.pilot.train import train_pilot
    from dynoffload.profiler.safefile import write_whole

    out.parent.mkdir(parents=True, exist_ok=True)
    limit = None if budget is None else parse_bytes(budget, "--budget")
    result = train_pilot(traces, model=model.value, budget=limit, seed=seed, jobs=jobs or -1)
    result.pilot.save(out)
    again = ["dynoffload", "pilot", "train", str(traces), "-o", str(out), "--model", model.value]
    again += ["--seed", str(seed), *(["--budget", budget] if budget else [])]
    card = card_path(out)
    text = model_card(result, command=shlex.join(again), nbytes=out.stat().st_size)
    write_whole(card, text.encode())
    facts: dict[str, int | float | str | None] = {
        "model": result.pilot.kind,
        "train_samples": result.train_samples,
        "seconds": result.seconds,
    }
    held = "sources held out" if len(result.sources) > 1 else "the last steps"
    _show(f"Pilot trained on {traces}, scored on {held}", facts, result.evaluation, as_json)
    say_wrote(out, card)


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
    _show(f"{pilot.name} on {traces}", {"model": loaded.kind}, evaluation, as_json)


def numbers_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return the scores by who made them, and the latency; what JSON lacks (NaN) is ``None``."""
    scores = {
        who.replace(", ", "_").replace(" ", "_"): {
            name: None if math.isnan(value) else value for name, value in row.to_json().items()
        }
        for who, row in evaluation.rows().items()
    }
    return {
        **scores,
        "one_ahead": evaluation.one_ahead,
        "latency_s": evaluation.latency_s,
        "latency_p95_s": evaluation.latency_p95_s,
        "sources": len(evaluation.sources),
        "trained_on": evaluation.trained_on,
    }


def _show(
    title: str,
    facts: Mapping[str, int | float | str | None],
    evaluation: Evaluation,
    as_json: bool,
) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, **numbers_of(evaluation)}, indent=2))
        return
    from dynoffload.pilot.evaluate import COLUMNS, LEGEND, PREDICTORS
    from dynoffload.pilot.pilot import RULE

    table = Table(title=title, title_justify="left")
    table.add_column("predictor")
    for header in (*COLUMNS, "samples"):
        table.add_column(header, justify="right")
    for who, row in evaluation.rows().items():
        shares = (row.block_order_accuracy, row.byte_weighted, row.whole_order, row.site_f1)
        shown = ("–" if math.isnan(share) else f"{share:.1%}" for share in shares)
        table.add_row(PREDICTORS[who], *shown, str(row.samples))
    console = stdout()
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    latency = (
        f"{format_seconds(evaluation.latency_s)} (95%: {format_seconds(evaluation.latency_p95_s)})"
    )
    seconds = facts.get("seconds")
    took = f"; trained in {format_seconds(seconds)}" if isinstance(seconds, float) else ""
    console.print(
        f"corrected during the step, the pilot predicts the next block {evaluation.one_ahead:.1%} "
        "of the time",
        highlight=False,
    )
    kind = facts["model"]
    model = "no model: every step runs the same blocks" if kind == RULE else f"model: {kind}"
    console.print(f"{model}; one prediction takes {latency}{took}", highlight=False)
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
