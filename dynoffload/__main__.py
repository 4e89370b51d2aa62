"""``python -m dynoffload``: the command line."""

from __future__ import annotations

from dynoffload.cli import app

app(prog_name="dynoffload")
