"""``dynoffload doctor``: examines the machine and prints tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from dynoffload.cli.app import EXIT_ERROR, app, stderr, stdout
from dynoffload.units import format_bytes

if TYPE_CHECKING:
    from dynoffload.doctor import Examination, System, Tiers


@app.command()
def doctor(
    spill_dir: Annotated[
        Path | None,
        typer.Option(help="Directory to measure; the one for temporary files by default."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.05, max=60, help="Seconds for each of seven measurements.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all that was found as JSON, in bytes.")
    ] = False,
) -> None:
    """Measure the tiers, read the limits, and say which budget fits.

    Ends with exit code 1 if the spill directory cannot be used.

    Examples:

    ```
    $ dynoffload doctor
    $ dynoffload doctor --spill-dir /mnt/nvme --json
    ```
    """
    from dynoffload.doctor import examine
    from dynoffload.memory.spill import default_spill_dir

    directory = default_spill_dir() if spill_dir is None else spill_dir
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.description}"))
    console = stderr()
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=1.0)
        found = examine(
            directory,
            seconds=seconds,
            progress=lambda name, done: progress.update(task, description=name, completed=done),
        )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _show(found, directory)
    if found.refusal:
        raise typer.Exit(EXIT_ERROR)


def _show(found: Examination, directory: Path) -> None:
    console = stdout()
    if found.tiers is not None:
        console.print(_bandwidth_table(found.tiers))
    facts = Table(title="This machine", title_justify="left", show_header=False, box=None)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    if found.filesystem is not None:
        free = format_bytes(found.filesystem.free_bytes)
        facts.add_row("spill directory", f"{directory} ({found.filesystem.kind}, {free} free)")
    if found.tiers is not None:
        facts.add_row("O_DIRECT", "used" if found.tiers.direct else "refused: buffered")
    for name, value in _facts(found.system):
        facts.add_row(name, Text(value))
    console.print(facts)
    console.print()
    good = bool(found.advice.budget) and not found.refusal
    console.print(Text(found.advice.line, "bold green" if good else "bold red"), soft_wrap=True)


def _bandwidth_table(tiers: Tiers) -> Table:
    table = Table(title="Bandwidth", title_justify="left")
    table.add_column("tier")
    table.add_column("direction")
    for header in ("threads", "chunk", "GB/s"):
        table.add_column(header, justify="right")
    for row in tiers.rows:
        tier = "memory" if row.direction.value == "memory" else "file"
        direction = {"memory": "copy", "mixed": "read and write"}.get(
            row.direction.value, row.direction.value
        )
        chunk = format_bytes(row.chunk)
        table.add_row(tier, direction, str(row.threads), chunk, f"{row.bps / 1e9:.2f}")
    return table


def _facts(system: System) -> Iterator[tuple[str, str]]:
    """Yield the system's limits as (name, text) pairs."""

    yield "system", f"{system.kernel}, {system.cores} cores"
    yield (
        "memory",
        f"{format_bytes(system.memory_available)} available of "
        f"{format_bytes(system.memory_total)}, swap {format_bytes(system.swap_total)}",
    )
    yield "this process may take", format_bytes(system.room)
    yield "transparent huge pages", system.huge_pages or "not in this kernel"
    scope = "user mode only" if system.user_mode else "system calls included"
    yield "userfaultfd", system.pager_refusal or scope
