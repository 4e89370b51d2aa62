"""Shared by pages and figures of experiments: tables, their place in a page, diagonals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from dynoffload.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
"""Marks around a table in a page."""

_WIDTH = 160  # of tables, if the output is not a terminal
_MARKS = re.compile(f"(<!-- table(?:: (.+?))? -->).*?{END}", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """Cells as text, for a terminal or a page.

    Attributes:
        title: shown above it.
        columns: column headers.
        rows: cells.
        words: indices of the text columns; all others are numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)

    def markdown(self) -> list[str]:
        """Return the lines of the table, without its title."""
        rules = ["---" if n in self.words else "---:" for n, _ in enumerate(self.columns)]
        return [f"| {' | '.join(row)} |" for row in (self.columns, rules, *self.rows)]


def show(*parts: Table | str) -> None:
    """Print tables and lines; a narrow terminal wraps cells but does not truncate them."""
    from rich.console import Console
    from rich.table import Column
    from rich.table import Table as Rich

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False)
            continue
        columns = (
            Column(name, justify="left" if number in part.words else "right", overflow="fold")
            for number, name in enumerate(part.columns)
        )
        table = Rich(*columns, title=part.title, title_justify="left", box=None)
        for row in part.rows:
            table.add_row(*row)
        console.print(table)


def fill_page(page: Path, parts: Sequence[Table | str]) -> None:
    """Rewrite a page between its marks.

    Marks that name a title get that table; marks without a title get all other tables and lines.

    Raises:
        ConfigError: the page has no marks, or names a table that does not exist.
    """
    named = {title for title in marks_of(page) if title}
    tables = {part.title: part for part in parts if isinstance(part, Table)}
    if strange := named - tables.keys():
        raise ConfigError(
            f"{page} has a place for a table {min(strange)!r}; there are {', '.join(tables)}"
        )
    rest: list[str] = []
    for part in parts:
        if isinstance(part, str):
            rest.append(f"- {part}")
        elif part.title not in named:
            rest += [*part.markdown(), ""]

    def filled(found: re.Match[str]) -> str:
        lines = tables[found[2]].markdown() if found[2] else rest
        return "\n".join((found[1], *lines, END))

    text = page.read_text(encoding="utf-8")
    page.write_text(_MARKS.sub(filled, text), encoding="utf-8")


def marks_of(page: Path) -> list[str]:
    """Return the titles of the tables that a page has marks for; "" for marks without a title.

    Raises:
        ConfigError: the page cannot be read, or has no marks without a title.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {page}, whose table is to be written: {why}") from error
    found = [title or "" for _, title in _MARKS.findall(text)]
    if "" not in found:
        raise ConfigError(f"{page} has no {BEGIN} ... {END}: put these lines where the table goes")
    return found


def marked(error: float, most: float) -> str:
    """Return a relative error as text; above ``most`` it is marked a miss."""
    return f"{error:+.1%}{' miss' if abs(error) > most else ''}"


def judged(name: str, errors: Sequence[float], most: float) -> str:
    """Return a summary of relative errors against the target of at most ``most``."""
    sizes = [abs(error) for error in errors] or [0.0]
    worst, within = max(sizes), sum(size <= most for size in sizes)
    return (
        f"{name}: median error {median(sizes):.1%}, worst {worst:.1%} (at most {most:.0%}: "
        f"{'holds' if worst <= most else 'missed'}), {within} of {len(sizes)} within"
    )


def draw_diagonal(
    axes: Axes, color: Mapping[str, str], values: Sequence[float], most: float
) -> None:
    """Draw the diagonal, and the band in which two numbers differ by at most ``most``.

    Args:
        axes: both become logarithmic.
        color: the canvas's colours.
        values: all plotted values, of both axes.
        most: relative difference.
    """
    ends = 0.8 * min(values), 1.25 * max(values)
    axes.plot(ends, ends, color=color["muted"], linewidth=1)
    axes.fill_between(
        ends,
        [(1 - most) * end for end in ends],
        [(1 + most) * end for end in ends],
        color=color["grid"],
        label=f"within {most:.0%}",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
