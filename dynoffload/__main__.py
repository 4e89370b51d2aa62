"""``python -m dynoffload``: the command line."""

from __future__ import annotations

import sys

try:
    from dynoffload.cli import app
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "dynoffload":
        raise
    sys.exit(f"dynoffload: the command line needs {error.name}, which is not installed here")

app(prog_name="dynoffload")
