"""``dynoffload experiment``: runs the experiments behind the published numbers, by name."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from dynoffload.cli.app import app, say_wrote, stdout
from dynoffload.errors import ConfigError
from dynoffload.termination import ended_by_signal

_OPEN: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],  # --help shows an experiment's options if one is named
}


@app.command(context_settings=_OPEN)
def experiment(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Which one; without it all are listed.", show_default=False)
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here as JSON; - prints them.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Measure again what this commit has measured.")
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Show what --json holds; measure nothing.")
    ] = False,
    show_options: Annotated[
        bool, typer.Option("--options", help="List the options of the experiment and stop.")
    ] = False,
    show_help: Annotated[
        bool, typer.Option("--help", "-h", help="Show this, or an experiment's options, and stop.")
    ] = False,
) -> None:
    """Run a named experiment and print its numbers.

    Each has options of its own: `--name value`, or `--name` for a switch. `--json PATH` also draws
    a figure next to that file, and updates the table of a docs page next to it. An interrupted run
    resumes. `all` runs every experiment in the docs; `--json` is then a folder.

    Examples:

    ```
    $ dynoffload experiment
    $ dynoffload experiment paged --options
    $ dynoffload experiment paged --json paged.json --steps 5
    $ dynoffload experiment all --json docs/results
    ```
    """
    from dynoffload import experiments

    if name is None and show_help:
        typer.echo(ctx.get_help())
        return
    if name is None:
        _list(experiments.EXPERIMENTS, experiments.summary)
        return
    if name == "all":
        if show_help or show_options:
            _list_bench(experiments.BENCH)
            return
        if ctx.args:
            raise ConfigError(
                f"experiment all has no option {ctx.args[0]!r}, only --json, --restart, --render"
            )
        _run_all(json_path or Path("docs/results"), ["--restart"] * restart + ["--render"] * render)
        return
    from dynoffload.experiments import harness

    kind = experiments.load(name)
    if show_options or show_help:
        stdout().print(experiments.summary(name), highlight=False)
        typer.echo(parser_of(name, kind.parameters).format_help())
        return
    options = vars(parser_of(name, kind.parameters).parse_args(ctx.args))
    del options["json"]  # this option belongs to the command
    to_stdout = json_path is not None and str(json_path) == "-"
    written = None if to_stdout else json_path
    tables = contextlib.redirect_stdout(sys.stderr) if to_stdout else contextlib.nullcontext()
    with ended_by_signal(), tables:
        if not render:
            result = harness.carry_out(kind, kind.parameters(**options), written, restart=restart)
        elif written is None:
            raise ConfigError("--render shows a file: name it by --json")
        else:
            result = harness.rendered(kind, written)
    if to_stdout:
        typer.echo(json.dumps(result, indent=2))
    if written is not None:
        say_wrote(written)


def _run_all(folder: Path, more: Sequence[str]) -> None:
    """Run the experiments of `BENCH`, each in its own process, and continue after failures.

    Raises:
        ConfigError: at least one failed.
    """
    from dynoffload import experiments

    failed = []
    for stem, words in experiments.BENCH.items():
        command = (words or stem).format(folder=folder).split()
        command += [*more, "--json", str(folder / f"{stem}.json")]
        typer.echo(f"dynoffload experiment {' '.join(command)}", err=True)
        started = [sys.executable, "-P", "-m", "dynoffload", "experiment", *command]
        with ended_by_signal(), subprocess.Popen(started) as child:
            try:
                child.wait()
            finally:
                child.terminate()
        if child.returncode:
            failed.append(stem)
    if failed:
        raise ConfigError(f"failed: {', '.join(failed)}; the same command goes on with them")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; --options lists what there is")


def parser_of(name: str, params: type[Any]) -> argparse.ArgumentParser:
    """Return a parser of an experiment's options: the fields of its dataclass."""
    from dynoffload.experiments import harness

    parser = _Parser(
        f"experiment {name}", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS
    )
    written = "where the numbers are written as JSON, with a figure beside them if one is drawn; "
    parser.add_argument("--json", metavar="PATH", help=f"{written}- prints them")
    meanings = harness.meanings_of(params)
    for key, (kind, default) in harness.options_of(params).items():
        shown = harness.listed(default) if isinstance(default, tuple) else default
        meaning = meanings[key] + ("" if shown in (None, "") else f" ({shown})")
        options: dict[str, Any] = {"dest": key, "help": meaning.replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            kinds = [one for one in typing.get_args(kind) if one not in (type(None), ...)]
            one = kinds[0] if kinds else kind
            many = typing.get_origin(kind) is tuple
            options |= {"type": _several(one) if many else one, "metavar": one.__name__.upper()}
        parser.add_argument(f"--{key.replace('_', '-')}", default=default, **options)
    return parser


def _several(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of comma-separated values; one with a comma in it stands in double quotes."""

    def read(text: str) -> tuple[Any, ...]:
        words = next(csv.reader([text], skipinitialspace=True), [])
        return tuple(kind(word.strip()) for word in words if word.strip())

    read.__name__ = f"list of {kind.__name__}"  # argparse errors show this name
    return read


def _list(registered: Mapping[str, str], summary: Callable[[str], str]) -> None:
    table = Table("name", "what it measures", box=None)
    for name in registered:
        table.add_row(name, summary(name))
    stdout().print(table)


def _list_bench(bench: Mapping[str, str]) -> None:
    stdout().print(
        "Runs these one after the other, and writes JSON and figure of each into the folder that "
        "--json names (docs/results). --restart and --render go to each of them.",
        highlight=False,
    )
    for stem, words in bench.items():
        command = (words or stem).format(folder="docs/results")
        stdout().print(f"  dynoffload experiment {command}", highlight=False, markup=False)
