"""Experts over processes on slow links: parts and strategies beside the layer in one part.

What it is: 2 and 4 gloo processes, each in a network namespace whose link is slowed, or, where none
can be made, with exchanges that take as long as their bytes would; layers in the proportions of
GPT-S, BERT-L and GPT-XL, made smaller; times of every number of parts and strategy, the layer's
own choice, what it took to choose, and peaks of allocations. What it is not: a measure of GPUs or
of NCCL; ranks share the cores of one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.experiments import write_json
from dynoffload.experiments.moe_pipeline_rank import PARTS, Task
from dynoffload.experiments.networks import namespaces
from dynoffload.experiments.workers import WorkerError
from dynoffload.memory.spill import default_spill_dir
from dynoffload.pilot.progress import progress_bar
from dynoffload.planning.strategies import Strategy
from dynoffload.units import format_bytes, format_seconds

SIZES = {"GPT-S": (768, 3072), "BERT-L": (1024, 4096), "GPT-XL": (2048, 8192)}
"""Width and hidden width of the layers."""

LINKS = ("auto", "namespaces", "delays")

_START_S = 60.0  # in which a rank imports and meets the others
_SILENT = 2  # timeouts in which rank 0 may say nothing


def run(
    json_path: Path | None = None,
    *,
    sizes: str = "GPT-S,BERT-L,GPT-XL",
    factor: int = 4,
    ranks: str = "2,4",
    mbit: str = "100,300,1000",
    tokens: int = 2048,
    experts: int = 16,
    k: int = 1,
    activation: str = "silu",
    steps: int = 9,
    seconds: float = 20.0,
    limit_share: float = 0.6,
    links: str = "auto",
    timeout: float = 120.0,
) -> dict[str, Any]:
    """Measure each layer at each number of ranks and bandwidth.

    Args:
        json_path: where what there is so far is written.
        sizes: of layers, by commas.
        factor: by which widths are smaller.
        ranks: numbers of processes, by commas.
        mbit: of links, in million bits a second, by commas.
        tokens: of each rank.
        experts: of all ranks.
        k: of each token.
        activation: ``"silu"`` or ``"swiglu"``.
        steps: timed at least, of each number of parts and strategy; the median is told.
        seconds: that those of a row take at least: quick steps are timed more often, as their
            medians differ more.
        limit_share: of what one part that is kept takes: the bound of the second choice.
        links: ``"namespaces"``, ``"delays"``, or ``"auto"``: namespaces where they can be made.
        timeout: seconds that a rank waits for others in one exchange.

    Returns:
        Rows by ranks, layer and bandwidth, and peaks by layer.

    Raises:
        ConfigError: an option cannot be.
        WorkerError: a rank failed, or says nothing any more.
    """
    layers = []
    for name in sizes.split(","):
        if name not in SIZES:
            raise ConfigError(f"sizes={sizes!r}: {name!r} is not one of {', '.join(SIZES)}")
        layers.append((name, SIZES[name][0] // factor, SIZES[name][1] // factor))
    if links not in LINKS:
        raise ConfigError(f"links={links!r} is not one of {', '.join(LINKS)}")
    worlds = [int(one) for one in ranks.split(",")]
    rates = [float(one) for one in mbit.split(",")]
    if steps < 1 or tokens < 1:
        raise ConfigError(f"steps={steps} and tokens={tokens} must be at least 1")
    result: dict[str, Any] = {
        "factor": factor, "tokens": tokens, "experts": experts, "k": k, "activation": activation,
        "steps": steps, "seconds": seconds, "limit_share": limit_share, "cores": os.cpu_count(),
        "rows": [], "memory": [],
    }  # fmt: skip
    with progress_bar(True) as report:
        for world in worlds:
            task = Task(
                0, world, "", layers, rates, tokens, experts, k, activation, steps, seconds,
                limit_share, False, timeout,
            )  # fmt: skip
            total = len(layers) * len(rates)

            def said(
                what: dict[str, Any], used: str, world: int = world, total: int = total
            ) -> None:
                if "row" in what:
                    result["rows"].append({**what["row"], "links": used})
                elif "memory" in what:
                    result["memory"].append({"ranks": world, **what["memory"]})
                done = sum(row["ranks"] == world for row in result["rows"])
                report(f"{world} ranks, {done} of {total}", done, total)
                if json_path is not None and "alive" not in what:
                    write_json(json_path, result)

            _run_ranks(task, links, said)
    _print(result)
    return result


def _run_ranks(task: Task, links: str, said: Callable[[dict[str, Any], str], None]) -> None:
    """Run the ranks of a task, and tell what the first one says, and what links were."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=default_spill_dir()))
        names: list[str] = []
        if links != "delays":
            try:
                names = stack.enter_context(namespaces(task.world))
            except ConfigError:
                if links == "namespaces":
                    raise
        isolated = bool(names)
        given = {**asdict(task), "namespaces": isolated}
        children: list[subprocess.Popen[str]] = []
        try:
            for rank in range(task.world):
                one = {**given, "rank": rank, "store": f"{folder}/store"}
                command = [sys.executable, "-P", "-m", "dynoffload.experiments.moe_pipeline_rank"]
                inside = ["ip", "netns", "exec", names[rank]] if isolated else []
                with Path(f"{folder}/errors-{rank}").open("w", encoding="utf-8") as errors:
                    children.append(
                        subprocess.Popen(
                            [*inside, *command, json.dumps(one)],
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                            text=True,
                        )
                    )
            for line in _lines(children[0], task):
                said(json.loads(line), "namespaces" if isolated else "delays")
            _ended(children, task, Path(folder))
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()


def _lines(child: subprocess.Popen[str], task: Task) -> Iterator[str]:
    """Yield the lines of rank 0, which come every few seconds while it works.

    Raises:
        WorkerError: it says nothing for longer than it may wait for others.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in child.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    patience = _START_S + _SILENT * task.timeout
    while True:
        try:
            line = lines.get(timeout=patience)
        except queue.Empty as error:
            raise WorkerError(
                f"rank 0 of {task.world} has said nothing for {patience:g} s, which is longer than "
                "it may wait for other ranks: it hangs; where steps take long, raise timeout="
            ) from error
        if line is None:
            return
        yield line


def _ended(children: list[subprocess.Popen[str]], task: Task, folder: Path) -> None:
    """Wait for all ranks.

    Raises:
        WorkerError: some failed, or do not end.
    """
    until = time.monotonic() + task.timeout
    wrong = []
    for rank, child in enumerate(children):
        try:
            code = child.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            wrong.append(f"rank {rank} of {task.world} did not end in {task.timeout:g} s")
            continue
        if code:
            told = (folder / f"errors-{rank}").read_text(encoding="utf-8")
            wrong.append(f"rank {rank} of {task.world} ended with code {code}: {told[-2000:]}")
    if wrong:
        raise WorkerError("\n".join(wrong))


def _name(choice: Any) -> str:
    parts, strategy = choice
    return f"{parts}, {strategy}"


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    times = Table(
        title=f"a step of the layer in parts, {result['tokens']} tokens a rank, widths by "
        f"1/{result['factor']}",
        caption=f"links by {', '.join(sorted({row['links'] for row in result['rows']}))}; medians "
        f"of {result['steps']} or more; noise: how far the same is apart from itself; again: "
        f"behind in steps that had no part in saying which is best; bound: memory at most "
        f"{result['limit_share']:g} of one part that is kept; overhead: of 1,000 steps",
        title_justify="left",
        caption_justify="left",
    )
    for header in (
        "ranks", "layer", "Mbit/s", "communication", "one part", "noise", "chosen", "speedup",
        "best", "behind", "again", "steps", "overhead", "chosen (bound)", "speedup", "best",
        "behind", "again", "steps", "overhead",
    ):  # fmt: skip
        times.add_column(header, justify="right")
    for row in result["rows"]:
        cells = [
            str(row["ranks"]), row["size"], f"{row['mbit']:g}", f"{row['communication_share']:.0%}",
            format_seconds(next(
                one["seconds"] for one in row["seconds"]
                if (one["parts"], one["strategy"]) == (1, "none")
            )), f"{row['noise']:.1%}",
        ]  # fmt: skip
        for name in ("free", "bound"):
            one = row[name]
            cells += [
                _name(one["chosen"]), f"{one['speedup']:.2f}", _name(one["best"]),
                f"{one['behind']:.1%}", f"{one['behind_again']:+.1%}", str(one["steps"]),
                f"{one['overhead_share']:.1%}",
            ]  # fmt: skip
        times.add_row(*cells)
    console.print(times)
    table = Table(
        title="peak of allocations of a step beside one part that is kept",
        caption="activations and buffers; in brackets with weights, gradients and two moments",
        title_justify="left",
        caption_justify="left",
    )
    for header in ("ranks", "layer", "strategy", "one part", *(f"n = {n}" for n in PARTS)):
        table.add_column(header, justify="right")
    for one in result["memory"]:
        at = {(row["parts"], row["strategy"]): row for row in one["rows"]}
        base = at[1, "none"]
        for strategy in Strategy:
            cells = [str(one["ranks"]), one["size"], strategy.value, format_bytes(base["bytes"])]
            for parts in PARTS:
                row = at[parts, strategy.value]
                ratio, whole = (row[key] / base[key] - 1 for key in ("bytes", "with_states"))
                cells.append(f"{ratio:+.0%} ({whole:+.0%})")
            table.add_row(*cells)
    console.print(table)
