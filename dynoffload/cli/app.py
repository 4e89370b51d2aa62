"""The root of the command line: the app, its global options, and how errors end a command.

[Note: exit codes] 0: done. 1: the request could not be met (any `DynOffloadError`), or the script
that was run raised an exception. 2: wrong usage. A script that calls ``sys.exit(n)`` ends the
command with ``n``.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.text import Text

from dynoffload.errors import ConfigError, DynOffloadError
from dynoffload.version import __version__

EXIT_ERROR = 1

EPILOG = (
    "Exit codes: 0 done, 1 the request could not be met (one line says why), 2 the command was "
    "misspelt; a script's own sys.exit(n) ends with n."
)


class RootGroup(typer.core.TyperGroup):
    """The root command; reports errors that users can fix in one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with `EXIT_ERROR` on a `DynOffloadError`, or on a file that cannot
        be read or written."""
        try:
            return super().invoke(ctx)
        except DynOffloadError as error:
            failed: DynOffloadError = error
        except OSError as error:
            if error.filename is None or error.strerror is None:
                raise  # from a closed pipe, which ends the command quietly
            failed = ConfigError(
                f"{error.filename}: {error.strerror}: check that path, or name another"
            )
            failed.__cause__ = error
        say_error(failed, debug=bool(ctx.params.get("debug")))
        raise typer.Exit(EXIT_ERROR) from failed


app = typer.Typer(
    name="dynoffload",
    cls=RootGroup,
    help=(
        "Train networks with dynamic control flow that are larger than fast memory: profile, "
        "train the pilot, train the network."
    ),
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        stdout().print(f"dynoffload {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and stop."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of errors, too.")
    ] = False,
) -> None:
    """Accept the options that precede the command."""


def stdout() -> Console:
    """Return a new console for results; not cached, as scripts and tests may replace the stream."""
    return Console()


def stderr() -> Console:
    """Return a console for errors, progress and notes, apart from the results."""
    return Console(stderr=True)


def say_error(error: DynOffloadError, *, debug: bool = False) -> None:
    """Print ``error`` as one line on stderr; with ``debug``, its traceback precedes it."""
    console = stderr()
    if debug:
        lines = "".join(traceback.format_exception(error))
        console.print(Text(lines.rstrip()), soft_wrap=True)
    text = str(error) or type(error).__name__
    message = Text.assemble(("error: ", "bold red"), " ".join(text.split()))
    message.append(getattr(error, "raised_at", ""), "dim")
    console.print(message, soft_wrap=True)


def say_note(text: str) -> None:
    """Print a line on stderr in the format of the package's log lines."""
    stderr().print(Text(f"dynoffload: {text}"), soft_wrap=True)


def say_wrote(*paths: Path) -> None:
    """List the files that a command wrote on stderr; stdout is for results alone."""
    console = stderr()
    for path in paths:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
