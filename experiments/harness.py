"""The harness shared by all experiments: runs cases, stores rows, renders results.

An experiment is a subclass of `Experiment`: a dataclass of parameters, cases, one row per case, the
columns of its table and, optionally, a summary and a figure. `carry_out` runs the cases missing in
the JSON written so far. It then renders the table on the terminal, and next to the JSON the figure
and the table within the Markdown page.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from dynoffload.errors import ConfigError
from dynoffload.experiments import make_room, write_json
from dynoffload.experiments.comparing import Table, fill_page, marks_of, show
from dynoffload.experiments.provenance import provenance
from dynoffload.pilot.progress import Report, progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
"""Result of a case, as JSON values."""
Cell = Callable[[Mapping[str, Any]], str]
"""Formats a row's cell of one column."""
P = TypeVar("P")
T = TypeVar("T")


def option(default: T, meaning: str, *, place: bool = False) -> T:
    """Return a parameter of an experiment: a field of its dataclass.

    Args:
        default: the value used for the experiment's page.
        meaning: one phrase, for ``--help``.
        place: whether it is a path on which no number depends.
    """
    found: T = field(default=default, metadata={"help": meaning, "place": place})
    return found


def check_known(
    name: str, given: Sequence[str], known: Iterable[str], *, some: bool = False
) -> None:
    """Raise `ConfigError` if an option names what there is not, or nothing where it is ``some``."""
    there_are = list(known)
    if some and not given:
        raise ConfigError(f"{name} names nothing; there are {listed(there_are)}")
    if strange := [one for one in given if one not in there_are]:
        raise ConfigError(f"{name} names {strange[0]!r}; there are {listed(there_are)}")


def listed(values: Iterable[object]) -> str:
    """Return ``values`` as the command line takes them: in double quotes if a comma is in one."""
    return ", ".join(f'"{text}"' if "," in text else text for text in map(str, values))


@dataclass(frozen=True)
class NoParameters:
    """The parameters of an experiment that has none."""


class Experiment(Generic[P]):
    """One experiment. The first line of its module's docstring says what it measures.

    Attributes:
        parameters: their dataclass; each field is an `option`.
        title: of its table.
        columns: of its table: header -> text of a row.
        words: headers, except the first, of columns that hold text and not numbers.
        resumes: whether later cases and the summary need only the rows of earlier cases.
        one_thread: whether torch computes with one thread.
        height: of the figure, in inches.
        params: of this run.
        rows: of the completed cases.
        report: shows progress within a case.
        stack: contexts to leave after the last case.
    """

    parameters: ClassVar[type[Any]] = NoParameters
    title: ClassVar[str] = ""
    columns: ClassVar[Mapping[str, Cell]] = {}
    words: ClassVar[Sequence[str]] = ()
    resumes: ClassVar[bool] = True
    one_thread: ClassVar[bool] = False
    height: ClassVar[float] = 4.6

    def __init__(self, params: P) -> None:
        self.params = params
        self.rows: list[Row] = []
        self.report: Report = lambda doing, done=None, total=None: None
        self.stack = ExitStack()

    def cases(self) -> Mapping[str, Any]:
        """Return the cases by name, in the order in which they run; raise for wrong parameters."""
        raise NotImplementedError

    def run(self, case: Any) -> Row:
        """Measure one case."""
        raise NotImplementedError

    def settled(self, row: Row) -> bool:
        """Return whether a later run may keep this row and not measure the case again."""
        return True

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return results computed from all rows."""
        return {}

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        """Return the tables and lines shown on a terminal and a page."""
        return [table(self.title, self.columns, result["rows"], self.words)]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        """Draw the figure; an experiment that does not override this has none."""


def table(
    title: str, columns: Mapping[str, Cell], rows: Sequence[Row], words: Sequence[str] = ()
) -> Table:
    """Return a table of ``rows``; its first column and those named in ``words`` are text."""
    heads = list(columns)
    return Table(
        title,
        heads,
        [[text(row) for text in columns.values()] for row in rows],
        words=[number for number, head in enumerate(heads) if not number or head in words],
    )


def turns(
    ways: Sequence[T], *, rounds: int, warmup: int = 0, per_turn: int = 1, lead: int = 0
) -> Iterator[tuple[T, bool]]:
    """Yield the next worker and whether its step is measured, so that workers alternate.

    If the machine becomes faster or slower, all are affected alike. Every second round runs
    backwards, so that none always follows the same neighbour.

    Args:
        ways: that take turns.
        rounds: turns of each.
        warmup: steps of each before the first round.
        per_turn: measured steps of a turn.
        lead: steps of a turn before those. They absorb the advantage of transfers that could
            finish during the others' turns.
    """
    for way in ways:
        yield from ((way, False) for _ in range(warmup))
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            yield from ((way, place >= lead) for place in range(lead + per_turn))


# Running


def carry_out(
    kind: type[Experiment[Any]],
    params: Any,
    json_path: Path | None = None,
    *,
    restart: bool = False,
) -> dict[str, Any]:
    """Run the missing cases, render, and return the result.

    Rows so far are stored in a partial file next to ``json_path``; the latter is written when all
    are there. Rows of the same parameters and the same commit are not measured again.

    Args:
        kind: the experiment.
        params: its parameters.
        json_path: of the result.
        restart: measure every case.

    Raises:
        ConfigError: a parameter is wrong, or a file that is to be written cannot be.
    """
    one = kind(params)
    with one.stack:
        if kind.one_thread:
            import torch

            one.stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        begun: dict[str, Any] = {
            "params": plain(params),
            "inputs": inputs_of(params),
            "made_by": provenance(),
        }
        result = None
        if json_path is not None:
            make_room(json_path, "--json")
            check_page(json_path)
            if not restart and kind.resumes:
                result = _kept(json_path, begun, kind)
                found = result or _kept(_partial(json_path), begun, kind) or {"rows": []}
                one.rows = [row for row in found["rows"] if one.settled(row)]
                if len(one.rows) < len(found["rows"]):
                    result = None
        if result is None:
            with progress_bar(True) as one.report:
                rows = _rows(one, begun, json_path)
                result = {**begun, "summary": one.summary(rows), "rows": rows}
            if json_path is not None:
                write_json(json_path, result)
                _partial(json_path).unlink(missing_ok=True)
    render(one, result, json_path)
    return result


def render(one: Experiment[Any], result: Mapping[str, Any], json_path: Path | None) -> None:
    """Print the tables; draw the figure and fill the page next to ``json_path``."""
    parts = [*one.parts(result), *_made_by(result)]
    show(*parts)
    if json_path is None:
        return
    if type(one).draw is not Experiment.draw:
        from dynoffload.reporting.canvas import write_figure

        write_figure(
            lambda figure, color: one.draw(figure, color, result),
            json_path.with_suffix(".svg"),
            height=one.height,
        )
    page = json_path.with_suffix(".md")
    if page.exists():
        fill_page(page, parts)


def rendered(kind: type[Experiment[Any]], json_path: Path) -> dict[str, Any]:
    """Render the result of an earlier run, and return it.

    Raises:
        ConfigError: it cannot be read, or is not a result of this experiment.
    """
    try:
        result: dict[str, Any] = json.loads(json_path.read_text(encoding="utf-8"))
        one = kind(_as_made(kind.parameters, result["params"]))
        [*one.parts(result), *_made_by(result)]  # fails on a result of another form
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        told = f"{json_path} holds no result of this experiment ({error}): run it without --render"
        raise ConfigError(told) from error
    check_page(json_path)
    render(one, result, json_path)
    return result


def check_page(json_path: Path) -> None:
    """Raise if a page next to ``json_path`` has no place for a table, before anything runs."""
    page = json_path.with_suffix(".md")
    if page.exists():
        marks_of(page)
        make_room(page, "--json")


def _rows(one: Experiment[Any], begun: Mapping[str, Any], json_path: Path | None) -> list[Row]:
    """Return the rows of all cases; measure the missing ones."""
    done = {row["case"]: row for row in one.rows}
    cases = one.cases()
    for number, (name, case) in enumerate(cases.items()):
        if name in done:
            continue
        one.report(name, number, len(cases))
        done[name] = {"case": name, **one.run(case)}
        one.rows.append(done[name])
        if json_path is not None and one.resumes:
            write_json(_partial(json_path), {**begun, "rows": one.rows})
    return [done[name] for name in cases]


def _partial(json_path: Path) -> Path:
    return json_path.with_suffix(".partial.json")


def _kept(
    path: Path, begun: Mapping[str, Any], kind: type[Experiment[Any]]
) -> dict[str, Any] | None:
    """Return the stored result of the same code and parameters, or None."""
    places = {one.name for one in fields(kind.parameters) if one.metadata["place"]}

    def settings(of: Mapping[str, Any]) -> Any:
        made = of["made_by"]
        used = {key: value for key, value in of["params"].items() if key not in places}
        return used, of.get("inputs"), made["commit"], made["machine"]

    if begun["made_by"]["commit"].endswith("-dirty"):
        return None  # uncommitted code cannot be identified
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found if settings(found) == settings(begun) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _made_by(result: Mapping[str, Any]) -> Iterator[str]:
    made = result["made_by"]
    machine = made.get("machine")
    where = (
        f", on {machine['cpu']}, {machine['threads']} of {machine['cores']} cores, torch "
        f"{machine['torch']}"
        if machine
        else ""
    )
    yield f"Made by `{made['command']}`, commit {made['commit']}{where}."


# Parameters


def options_of(params: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options of a dataclass of parameters: name -> (type, default)."""
    hints = typing.get_type_hints(params)
    for one in fields(params):
        if one.default is MISSING:
            raise ConfigError(f"experiment option {one.name!r} has no default value")
    return {one.name: (hints[one.name], one.default) for one in fields(params)}


def meanings_of(params: type[Any]) -> dict[str, str]:
    """Return the help text of each option."""
    return {one.name: one.metadata["help"] for one in fields(params)}


def plain(params: Any) -> dict[str, Any]:
    """Return parameters as JSON values."""
    return {one.name: _plain(getattr(params, one.name)) for one in fields(params)}


def inputs_of(params: Any) -> dict[str, str]:
    """Return a content digest of each file or folder that a parameter names as input."""
    found = {}
    for one in fields(params):
        path = getattr(params, one.name)
        if isinstance(path, Path) and not one.metadata["place"]:
            digest = hashlib.sha256()
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file():
                    digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
            found[one.name] = digest.hexdigest()
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _as_made(params: type[Any], found: Mapping[str, Any]) -> Any:
    """Return a run's parameters from JSON. They are not validated: today's checks may refuse an
    older run's, and they are only rendered."""
    hints = typing.get_type_hints(params)

    def typed(value: Any, kind: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        return Path(value) if Path in kinds and value is not None else value

    made = object.__new__(params)
    for one in fields(params):
        value = typed(found[one.name], hints[one.name]) if one.name in found else one.default
        object.__setattr__(made, one.name, value)
    return made
