"""The largest batch of trunks of AlphaFold's kind in so much memory: plain, and by every policy.

What it is: the zoo's Evoformer with recycling, and ESMFold of transformers, whose batches grow by
rows until they no longer train, for each way of training, by trying
(`dynoffload.experiments.largest`). Nearly all of the memory is activations. What it is not: the
published measurement, which was of AlphaFold on an accelerator with unified memory; paging by the
system stands for that here.

With ``--json PATH`` the figure is written beside it, as ``PATH`` with the suffix ``.svg``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dynoffload.experiments.comparing import check_page, write_between
from dynoffload.experiments.largest import OURS, WAYS, Search, measure
from dynoffload.experiments.largest_views import draw, show, table_of
from dynoffload.experiments.trainer import Spec
from dynoffload.experiments.zoo import FOLDING, TRUNK
from dynoffload.pilot.progress import progress_bar
from dynoffload.units import format_bytes, parse_bytes

PUBLISHED = {"over_system": 3.0, "over_dtr": 2.1}
"""Times the largest batch of unified memory, and of dynamic tensor rematerialisation."""
_UNIT = "rows"


def run(
    json_path: Path | None = None,
    *,
    memory: str = "512MiB",
    share: float = 0.6,
    preset: str = "small",
    length: int = 16,
    depth: int = 8,
    cycles: int = 3,
    steps: int = 2,
    slowest: float = 8.0,
    most: int = 64,
    networks: str = f"{TRUNK},{FOLDING}",
    ways: str = ",".join(WAYS),
    page: Path | None = None,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Search for each network and way.

    Args:
        json_path: the figure is written beside it.
        memory: that a process may take beyond what it takes without a network; its control group
            is limited to that, so this needs the right to make one.
        share: of that memory, as the budget of the ways that count bytes: offload and dtr.
        preset: of both networks.
        length: residues of a row.
        depth: sequences of its alignment.
        cycles: most runs of the trunk; drawn for each step.
        steps: that each try makes after the first.
        slowest: a size counts as too slow if a row takes so many times what it takes plainly.
        most: rows that are tried at the most.
        networks: names in the zoo, separated by commas.
        ways: of training, separated by commas; there are no others than by default.
        page: a Markdown file whose tables are written anew, between the lines that say
            <!-- table --> and <!-- end of table -->.
        spill_dir: where spill and swap files lie.
    """
    check_page(page)
    result: dict[str, Any] = {
        "memory_bytes": parse_bytes(memory),
        "length": length,
        "depth": depth,
        "cycles": cycles,
        "slowest": slowest,
        "published": PUBLISHED,
        "networks": {},
    }
    fixed = {"min_length": length, "max_length": length, "min_depth": depth, "max_depth": depth}

    def spec(network: str, rows: int) -> Spec:
        shape = {"rows": rows, "max_cycles": cycles, **fixed}
        return Spec(network, preset, shape=shape)

    with progress_bar(True) as report:
        for network in networks.split(","):
            search = Search(
                partial(spec, network.strip()),
                parse_bytes(memory),
                share,
                steps,
                slowest,
                most,
                meta=False,
                **({} if spill_dir is None else {"spill_dir": spill_dir}),
            )
            found = measure(search, [key.strip() for key in ways.split(",")], report)
            result["networks"][network.strip()] = found | _ratios(found)
            result["budget_bytes"] = search.budget
    searches = _searches(result)
    for each in searches:
        show(*each)
    if json_path is not None:
        from dynoffload.reporting.canvas import write_figure

        write_figure(
            lambda figure, color: draw(figure, color, searches),
            json_path.with_suffix(".svg"),
            height=3.2 * len(searches),
        )
    if page is not None:
        write_table(result, page)
    return result


def write_table(result: Mapping[str, Any], page: Path) -> None:
    """Write the tables of ``page`` anew, between its marks."""
    lines = [
        line
        for title, unit, found in _searches(result)
        for line in (f"### {title}", "", *table_of(unit, found), "")
    ]
    write_between(page, lines[:-1])


def _searches(result: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return title, unit and what was found, network by network."""
    return [
        (f"rows of {network} in {format_bytes(result['memory_bytes'])}", _UNIT, found)
        for network, found in result["networks"].items()
    ]


def _ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Return how many times the others' largest batch ours is: of all, and by pace."""
    ways = found["ways"]
    if OURS not in ways:
        return {}
    others = [key for key in ways if key != OURS]
    ours = ways[OURS]
    return {
        **{
            f"over_{key}": ours["largest"] / ways[key]["largest"]
            for key in others
            if ways[key]["largest"]
        },
        "within": {
            pace: {
                f"over_{key}": rows / ways[key]["within"][pace]
                for key in others
                if ways[key]["within"][pace]
            }
            for pace, rows in ours["within"].items()
        },
    }
