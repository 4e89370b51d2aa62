"""``dynoffload experiment``: the measurements behind the published numbers, each by its name."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from dynoffload.cli.app import app, say_wrote, stdout
from dynoffload.errors import ConfigError
from dynoffload.termination import ended_by_signal

_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_OPEN: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],  # --help is the experiment's, where one is named
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

    Each has options of its own: `--name value`, or `--name` for a switch. With `--json PATH` a
    figure is drawn beside it, and the table of a page beside it is written anew. A run that was
    ended goes on where it was. `all` runs what the pages are made of; `--json` is its folder.

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
        _list_options(name, kind.parameters)
        return
    options = parse_options(name, ctx.args, harness.options_of(kind.parameters))
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
    """Run what `BENCH` names, each in a process of its own, and go on where one fails.

    Raises:
        ConfigError: some failed.
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


def parse_options(
    experiment_name: str, words: list[str], accepted: Mapping[str, tuple[Any, Any]]
) -> dict[str, Any]:
    """Return ``--name value``, ``--name=value`` and ``--switch`` as keyword arguments.

    Raises:
        ConfigError: for an option that the experiment does not have, or a value of a wrong type.
    """
    options: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        key = word[2:].replace("-", "_")
        if not word.startswith("--") or key not in accepted:
            known = ", ".join("--" + name.replace("_", "-") for name in accepted) or "none"
            raise ConfigError(
                f"experiment {experiment_name!r} has no option {word!r}; its options: {known}"
            )
        kind = accepted[key][0]
        if not equals and kind is bool:
            options[key] = True
            continue
        if not equals:
            if not rest:
                raise ConfigError(f"option {word} needs a value")
            value = rest.pop(0)
        options[key] = _convert(word, value, kind)
    return options


def _convert(option: str, value: str, kind: Any) -> Any:
    """Return ``value`` as ``kind``: a plain type, a union, or a list separated by commas."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [k for k in inner if k is not type(None)]
        for choice in kinds[:-1]:
            try:
                return _convert(option, value, choice)
            except ConfigError:
                continue
        return _convert(option, value, kinds[-1])
    if origin in (list, tuple) or str(origin).endswith("Sequence'>"):
        words = [word.strip() for word in value.split(",")]
        items = [_convert(option, word, inner[0]) for word in words if word]
        return items if origin is list else tuple(items)
    if kind is bool:
        if value.lower() not in _SWITCH:
            raise ConfigError(f"option {option}: {value!r} is neither true nor false")
        return _SWITCH[value.lower()]
    try:
        return kind(value) if kind in (int, float, Path) else value
    except ValueError as error:
        raise ConfigError(f"option {option}: {value!r} is not of type {kind.__name__}") from error


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


def _list_options(name: str, params: type[Any]) -> None:
    from dynoffload.experiments import harness

    table = Table(title=name, title_justify="left", box=None)
    table.add_column("option", no_wrap=True)
    table.add_column("default", overflow="fold")
    table.add_column("")
    written = "Where the numbers are written as JSON, with a figure beside them if one is drawn; "
    table.add_row("--json", "", f"{written}- prints them.")
    meanings = harness.meanings_of(params)
    for key, (_, default) in harness.options_of(params).items():
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        text = "" if shown is None else str(shown)
        table.add_row("--" + key.replace("_", "-"), Text(text), Text(meanings[key]))
    stdout().print(table)
