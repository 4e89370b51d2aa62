"""A progress bar that appears once a job has taken two seconds, and is gone with the job.

Without a terminal it is a line for each part of the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

PATIENCE = 2.0
"""Seconds before a bar appears."""


class Report(Protocol):
    """Says how far a job is."""

    def __call__(self, doing: str, done: int | None = None, total: int | None = None) -> None:
        """Say what is being done and, where it is known, how much of how much is done."""
        ...


@contextmanager
def progress_bar(wanted: bool) -> Iterator[Report]:
    """Yield a `Report` that shows a bar on stderr from the third second on, or shows nothing."""
    if not wanted:
        yield lambda doing, done=None, total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console, start, said = Console(stderr=True), monotonic(), ""

    def say(doing: str, done: int | None = None, total: int | None = None) -> None:
        nonlocal said
        if doing != said and monotonic() - start > PATIENCE:
            said = doing
            console.print(doing, markup=False, highlight=False)

    if not console.is_terminal:
        yield say
        return

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("pilot", total=None)

    def report(doing: str, done: int | None = None, total: int | None = None) -> None:
        if not bar.live.is_started and monotonic() - start > PATIENCE:
            bar.start()
        bar.update(task, description=doing, completed=done, total=total)

    try:
        yield report
    finally:
        if bar.live.is_started:  # else stopping it would print an empty line
            bar.stop()
