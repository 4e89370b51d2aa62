"""``dynoffload export``: writes a recorded step in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynoffload.cli.app import app, say_wrote


@app.command()
def export(
    trace: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="A trace that 'dynoffload profile' wrote."
        ),
    ],
    chakra: Annotated[
        Path,
        typer.Option(
            dir_okay=False, help="Write it here as an MLCommons Chakra execution trace (.et)."
        ),
    ],
) -> None:
    """Write a trace in the format of another tool.

    A Chakra execution trace has one node per operator, with its dependencies, its time and its
    bytes; Chakra's simulators replay it. Needs `pip install '.[chakra]'` in a checkout.

    Example:

    ```
    $ dynoffload export traces/step-000003.trace --chakra step.et
    ```
    """
    from dynoffload.integrations.chakra import write_chakra
    from dynoffload.profiler.storage import load_trace

    say_wrote(write_chakra(load_trace(trace), chakra))
