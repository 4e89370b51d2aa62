"""A progress bar that appears once a job has taken two seconds and disappears at its end.

Without a terminal it prints one line per part of the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

PATIENCE = 2.0
"""Seconds before a bar appears."""


class Report(Protocol):
    """Reports the progress of a job."""

    def __call__(self, doing: str, done: int | None = None, total: int | None = None) -> None:
        """Report the current part of the job and, if known, its progress and total."""
        ...


@contextmanager
def progress_bar(wanted: bool) -> Iterator[Report]:
    """Yield a `Report` that shows a bar on stderr after `PATIENCE`, or does nothing."""
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
        if bar.live.is_started:  # stopping a bar that never started prints an empty line
            bar.stop()
