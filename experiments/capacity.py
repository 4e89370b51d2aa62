"""The largest network that trains in so much memory: plain, and by every policy.

What it is: a mixture of experts that grows by layers until it no longer trains, for each way of
training, by trying (`dynoffload.experiments.largest`). What it is not: a limit of dynoffload's own;
what it keeps in memory hardly grows with a network's depth, so the time of a step ends it, or the
disk, or `most`.

With ``--json PATH`` the figure is written beside it, as ``PATH`` with the suffix ``.svg``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynoffload.experiments.comparing import check_page, write_between
from dynoffload.experiments.largest import WAYS, Search, measure
from dynoffload.experiments.largest_views import draw, show, table_of
from dynoffload.experiments.trainer import Spec
from dynoffload.pilot.progress import progress_bar
from dynoffload.units import format_bytes, parse_bytes

PUBLISHED = 8.0
"""Times the largest network of plain PyTorch, as published for this way of offloading."""
SIZES = {"hidden": 256, "heads": 8, "experts": 8, "width": 512}
"""Of each layer: 3.4 million parameters, so that plain training holds a handful of layers."""
_UNIT = "layers"


def run(
    json_path: Path | None = None,
    *,
    memory: str = "512MiB",
    share: float = 0.5,
    tokens: int = 512,
    steps: int = 2,
    slowest: float = 8.0,
    most: int = 64,
    ways: str = ",".join(WAYS),
    page: Path | None = None,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Search for each way.

    Args:
        json_path: the figure is written beside it.
        memory: that a process may take beyond what it takes without a network; its control group
            is limited to that, so this needs the right to make one.
        share: of that memory, as the budget of the ways that count bytes: offload and dtr.
        tokens: of a step.
        steps: that each try makes after the first.
        slowest: a size counts as too slow if a layer takes so many times what it takes plainly.
        most: layers that are tried at the most.
        ways: of training, separated by commas; there are no others than by default.
        page: a Markdown file whose table is written anew, between the lines that say <!-- table -->
            and <!-- end of table -->.
        spill_dir: where spill and swap files lie.
    """
    check_page(page)
    search = Search(
        lambda layers: Spec(
            "moe",
            "tiny",
            sizes={**SIZES, "layers": layers},
            shape={"rows": 1, "length": tokens},
        ),
        parse_bytes(memory),
        share,
        steps,
        slowest,
        most,
        meta=True,
        **({} if spill_dir is None else {"spill_dir": spill_dir}),
    )
    with progress_bar(True) as report:
        found = measure(search, [key.strip() for key in ways.split(",")], report)
    result = {
        "network": "moe",
        "sizes": SIZES,
        "tokens": tokens,
        "memory_bytes": search.memory,
        "budget_bytes": search.budget,
        "slowest": slowest,
        "published_over_plain": PUBLISHED,
        **found,
    }
    title = f"layers of a mixture of experts in {format_bytes(search.memory)}"
    show(title, _UNIT, result)
    if json_path is not None:
        from dynoffload.reporting.canvas import write_figure

        write_figure(
            lambda figure, color: draw(figure, color, [(title, _UNIT, result)]),
            json_path.with_suffix(".svg"),
            height=3.2,
        )
    if page is not None:
        write_table(result, page)
    return result


def write_table(result: Mapping[str, Any], page: Path) -> None:
    """Write the table of ``page`` anew, between its marks."""
    write_between(page, table_of(_UNIT, result))
