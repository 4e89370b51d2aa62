"""``dynoffload structure``: the control flow that recorded steps have in common."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dynoffload.cli.app import app, stdout
from dynoffload.errors import TraceError

_MEANINGS = {
    "traces": "merged",
    "operators": "in the traces",
    "sites": "modules at which operators run",
    "slots": "operators and calls in the structure",
    "choices": "places that leave open what comes next",
    "loops": "whose counts are open",
    "decisions": "of a trace's path, at most",
    "compression": "operators for each slot",
}


@app.command()
def structure(
    traces: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="What 'dynoffload profile' wrote.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Merge traces into one control flow, and say how large it is.

    Each trace is a path through it; that the path gives the trace's operators back, in order, is
    checked for every one.

    Example:

    ```
    $ dynoffload structure traces/
    ```
    """
    from dynoffload.planning import Structure
    from dynoffload.profiler import Trace, load_traces, trace_files

    files = trace_files(traces)
    merged = Structure(load_traces(files))
    decisions = 0
    for file in files:  # Loaded once more: all at once may not fit in memory.
        trace = Trace.load(file)
        path = merged.path_of(trace)
        decisions = max(decisions, len(path.decisions))
        wanted = [(op.name, op.phase, op.site) for op in trace.operators]
        if [tuple(step) for step in merged.operators(path)] != wanted:
            raise TraceError(f"{file}: its path gives other operators back; please report this")
    size = merged.size
    numbers: dict[str, Any] = asdict(size)
    numbers |= {"decisions": decisions, "compression": size.compression}
    if as_json:
        typer.echo(json.dumps(numbers, indent=2))
        return
    table = Table(show_header=False, box=None)
    for name, meaning in _MEANINGS.items():
        number = numbers[name]
        shown = f"{number:.1f}" if isinstance(number, float) else str(number)
        table.add_row(name, f"[bold]{shown}[/]", f"[dim]{meaning}[/]")
    stdout().print(table)
