"""The largest batch of trunks of AlphaFold's kind in so much memory: plain, and by every policy.

What it is: the zoo's Evoformer with recycling, and ESMFold of transformers, whose batches grow by
rows until they no longer train, for each way of training, by trying
(`dynoffload.experiments.largest`). Nearly all of the memory is activations. What it is not: the
published measurement, which was of AlphaFold on an accelerator with unified memory; paging by the
system stands for that here.

With ``--json PATH`` the figure is written beside it, as ``PATH`` with the suffix ``.svg``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from dynoffload.experiments.largest import WAYS, Search, draw, measure, show
from dynoffload.experiments.trainer import Spec
from dynoffload.experiments.zoo import FOLDING, TRUNK
from dynoffload.pilot.progress import progress_bar
from dynoffload.units import format_bytes, parse_bytes

PUBLISHED = {"over_system": 3.0, "over_dtr": 2.1}
"""Times the largest batch of unified memory, and of dynamic tensor rematerialisation."""


def run(
    json_path: Path | None = None,
    *,
    memory: str = "768MiB",
    share: float = 0.6,
    preset: str = "small",
    length: int = 24,
    depth: int = 8,
    cycles: int = 3,
    steps: int = 3,
    slowest: float = 3.0,
    most: int = 64,
    networks: str = f"{TRUNK},{FOLDING}",
    ways: str = ",".join(WAYS),
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Search for each network and way.

    Args:
        json_path: the figure is written beside it.
        memory: that a process may take beyond what it takes without a network.
        share: of it that is the budget of ways that count bytes.
        preset: of both networks.
        length: residues of a row.
        depth: sequences of its alignment.
        cycles: most runs of the trunk; drawn for each step.
        steps: that each try makes after the first.
        slowest: times what plain training takes for a row, that a step may take for one.
        most: rows that are tried at the most.
        networks: names in the zoo, separated by commas.
        ways: keys of `dynoffload.experiments.largest.WAYS`, separated by commas.
        spill_dir: where spill and swap files lie.
    """
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
    for network, found in result["networks"].items():
        show(_title(network, result), "rows", found)
    if json_path is not None:
        from dynoffload.reporting.canvas import write_figure

        write_figure(
            lambda figure, color: _draw(figure, color, result),
            json_path.with_suffix(".svg"),
            height=2.8 * len(result["networks"]),
        )
    return result


def _title(network: str, result: dict[str, Any]) -> str:
    return f"rows of {network} in {format_bytes(result['memory_bytes'])}"


def _ratios(found: dict[str, Any]) -> dict[str, float]:
    """Return how many times the others' largest batch the pilot's is."""
    rows = {key: row["largest"] for key, row in found["ways"].items()}
    ours = rows.get("pilot", 0)
    return {f"over_{key}": ours / other for key, other in rows.items() if key != "pilot" and other}


def _draw(figure: Any, color: Any, result: dict[str, Any]) -> None:
    networks = result["networks"]
    every = figure.subplots(len(networks), 1, squeeze=False)[:, 0]
    for axes, (network, found) in zip(every, networks.items(), strict=True):
        draw(axes, color, _title(network, result), found)
