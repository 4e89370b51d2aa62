"""The command line of dynoffload, one file per command; the entry point is `app`.

Torch is imported only inside commands, so ``--help`` answers at once.
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
