"""Shared matplotlib styling, axes, legends and SVG export for report figures.

matplotlib is imported inside functions, and without pyplot: no display, no global state.

[Note: colours that follow the page] An SVG inside a page can use CSS variables as colours, so one
drawing serves the light and the dark theme. matplotlib has no CSS variables. Each colour is drawn
as a unique placeholder hex value, later replaced in the text by ``var(--name)``.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dynoffload.reporting.columns import Columns
from dynoffload.units import GiB, KiB, MiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = (
    *("ink", "muted", "grid", "forward", "backward", "optimizer"),
    *("plan", "fault", "evict", "stall", "budget", "fast", "rss", "compute", "paper"),
)
COLOR = {name: f"#0b0e{index:02x}" for index, name in enumerate(_NAMES, 16)}
"""Placeholder of each colour of the page; see [Note: colours that follow the page]."""

PAPER = {
    "ink": "#1c2430",
    "muted": "#5d6878",
    "grid": "#dde2e9",
    "paper": "#ffffff",
    "forward": "#3173b8",
    "backward": "#7a55b0",
    "optimizer": "#23806b",
    "compute": "#5b7fa6",
    "plan": "#3f8fd2",
    "fault": "#e08a1e",
    "evict": "#9a8cc4",
    "stall": "#cf3e4d",
    "budget": "#b3261e",
    "fast": "#2f7fc4",
    "rss": "#8a94a3",
}
"""Light-theme colours for standalone files."""

WIDTH = 11.0  # inches; the page scales it to the column
_DPI = 72.0  # one pixel is one point


def svg(draw: Callable[[Figure], None], *, height: float, name: str) -> str:
    """Return the figure that ``draw`` makes as an SVG element whose colours are CSS variables.

    Args:
        draw: called with an empty `Figure` in the page's style.
        height: inches; the width is `WIDTH`.
        name: of the figure, unique on the page.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(cast(Any, _style(COLOR, name))):
        figure = Figure(figsize=(WIDTH, height), dpi=_DPI, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for color, placeholder in COLOR.items():
        text = text.replace(placeholder, f"var(--{color})")
    return text


def write_figure(
    draw: Callable[[Figure, Mapping[str, str]], None], path: Path, *, height: float
) -> None:
    """Write the figure that ``draw`` makes as a standalone file, on white.

    Args:
        draw: called with an empty `Figure` and the colours to use, by name.
        path: ends in ``.svg`` or ``.png``.
        height: inches; the width is `WIDTH`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(cast(Any, _style(PAPER, path.stem))):
        figure = Figure(figsize=(WIDTH, height), dpi=_DPI, layout="constrained")
        draw(figure, PAPER)
        vector = path.suffix == ".svg"
        extra: dict[str, Any] = {"metadata": {"Date": None, "Creator": None}} if vector else {}
        figure.savefig(path, dpi=2 * _DPI, facecolor=PAPER["paper"], **extra)


def _style(color: Mapping[str, str], salt: str) -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,  # ids must differ between the figures of one page
        "font.family": "sans-serif",
        "font.size": 8.5,
        "text.color": color["ink"],
        "axes.labelcolor": color["muted"],
        "axes.edgecolor": color["grid"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": color["grid"],
        "grid.linewidth": 0.6,
        "xtick.color": color["muted"],
        "ytick.color": color["muted"],
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }


def legend(axes: Axes, *, lifted: bool = False) -> None:
    """Place the legend above the axes, right-aligned, so no curve passes under it.

    ``lifted`` leaves room for the step numbers along the top edge.
    """
    lift = 20 / axes.get_window_extent().height if lifted else 0.0  # pixels are points
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0 + lift),
        ncols=4,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.4,
        borderaxespad=0.2,
    )


def step_marks(axes: Axes, columns: Columns) -> None:
    """Label steps on the top axis, thinned to stay legible."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    steps = sorted(columns.steps)
    if not steps:
        return
    apart = round_up(max(1.0, len(steps) / 14))
    shown = [step for step in steps if step % apart == 0]
    top = axes.secondary_xaxis("top")
    top.xaxis.set_major_locator(FixedLocator([columns.steps[s][0] for s in shown]))
    top.xaxis.set_major_formatter(FixedFormatter([str(s) for s in shown]))
    top.tick_params(colors=COLOR["muted"], labelsize=7.5, length=3)
    top.spines["top"].set_visible(False)
    axes.annotate(
        "step",
        (0, 1),
        xycoords="axes fraction",
        xytext=(-6, 7),
        textcoords="offset points",
        ha="right",
        va="center",
        color=COLOR["muted"],
        fontsize=7.5,
    )


def time_axis(axes: Axes, begin: float, end: float) -> None:
    """Label the x axis in seconds, or in minutes if it spans more than ten."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    minutes = (end - begin) / 60
    long = minutes > 10
    if long:
        axes.xaxis.set_major_locator(MultipleLocator(60 * round_up(max(1.0, minutes / 12))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 60:g}"))
    axes.set_xlim(begin, max(end, begin + 1e-9))
    axes.set_xlabel(f"{'minutes' if long else 'seconds'} since the session began")


def unit_of(largest: int) -> tuple[int, str]:
    """Return the largest binary unit not above ``largest`` bytes: its size and its name."""
    for size, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if largest >= size:
            return size, name
    return 1, "B"


def round_up(count: float) -> int:
    """Round ``count`` up to the next of 1, 2, 5, 10, 20, ..."""
    power = 10 ** math.floor(math.log10(count))
    return int(next(power * m for m in (1, 2, 5, 10) if power * m >= count))
