"""The root of the command line: the app, its global options, and how errors end a command.

[Note: exit codes] 0: done. 1: the request could not be met (any `DynOffloadError`), or the script
that was run failed by an exception. 2: the command was misspelt. A script that ends by
``sys.exit(n)`` ends the command with ``n``.
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
    """The root command: what a user can put right is said in one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; end by `EXIT_ERROR` on a `DynOffloadError`, or on a file that cannot be
        read or written."""
        try:
            return super().invoke(ctx)
        except DynOffloadError as error:
            failed: DynOffloadError = error
        except OSError as error:
            if error.filename is None or error.strerror is None:
                raise  # of a closed pipe, which ends the command quietly
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
    """Take the options that stand before the command."""


def stdout() -> Console:
    """Return a console for results; made anew, as scripts and tests may replace the stream."""
    return Console()


def stderr() -> Console:
    """Return a console for what is said beside the results: errors, progress, notes."""
    return Console(stderr=True)


def say_error(error: DynOffloadError, *, debug: bool = False) -> None:
    """Print ``error`` as one line on the error stream, preceded by its traceback in debug."""
    console = stderr()
    if debug:
        lines = "".join(traceback.format_exception(error))
        console.print(Text(lines.rstrip()), soft_wrap=True)
    text = str(error) or type(error).__name__
    message = Text.assemble(("error: ", "bold red"), " ".join(text.split()))
    message.append(getattr(error, "raised_at", ""), "dim")
    console.print(message, soft_wrap=True)


def say_note(text: str) -> None:
    """Print a line on the error stream in the manner of the package's log lines."""
    stderr().print(Text(f"dynoffload: {text}"), soft_wrap=True)


def say_wrote(*paths: Path) -> None:
    """Name the files that a command wrote, on the error stream: results alone go to stdout."""
    console = stderr()
    for path in paths:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
