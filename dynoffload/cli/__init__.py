"""The command line of dynoffload; the entry point is `app`.

What it is: one file per command, put together here. What it is not: the work; each command calls
the public functions of the wings and shows what they return. Torch is not imported before a command
needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

from dynoffload.cli import doctor, estimate, experiment, export, pilot, report, training
from dynoffload.cli.app import app

__all__ = [
    "app",
    "doctor",
    "estimate",
    "experiment",
    "export",
    "pilot",
    "report",
    "training",
]
