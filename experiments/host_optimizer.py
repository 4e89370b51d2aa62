"""The optimizer on the host: what a delayed update does to the loss, and what tiles and files cost.

What it is: a small language model in half precision, trained on the same texts by a `HostOptimizer`
with and without delay; the rate of its kernel by the size of tiles, in memory and in a file; and
the time of a step whose update is made beside it. What it is not: a measure of a link; parameters
are on the CPU here, and forward and backward share their cores with the update.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from dynoffload.errors import ConfigError
from dynoffload.experiments import zoo
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.pilot.progress import progress_bar
from dynoffload.units import KiB, MiB, format_bytes, format_seconds

TILES = (256 * KiB, MiB, 4 * MiB, 8 * MiB, 16 * MiB, 64 * MiB)
_LAST = 10  # steps of which the mean loss is told
_ROUNDS = 5  # of updates that are timed


def run(
    json_path: Path | None = None,
    *,
    preset: str = "tiny",
    steps: int = 300,
    warmup: int = 40,
    seeds: int = 3,
    length: int = 128,
    lr: float = 1e-3,
    elements: int = 1 << 24,
    threads: int = 0,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Train, and time.

    Args:
        json_path: not used; the numbers are written by the caller.
        preset: sizes of the language model, which is in bfloat16.
        steps: of each training.
        warmup: steps that are not delayed, where some are not.
        seeds: of texts and weights, each of which is trained with.
        length: tokens of a sample.
        lr: of AdamW.
        elements: of the parameter whose update is timed.
        threads: that update; 0: one for each core of this process.
        spill_dir: where files lie; without, none is timed.

    Returns:
        Losses by seed and kind of step, rates by tile, and seconds of steps.

    Raises:
        ConfigError: there are too few steps to tell a loss by.
    """
    if steps <= max(warmup, _LAST) or seeds < 1:
        raise ConfigError(
            f"steps={steps} must be more than warmup={warmup} and {_LAST}, and seeds={seeds} at "
            "least 1"
        )
    count = threads or None
    kinds: dict[str, dict[str, Any]] = {
        "normal": {},
        "delayed": {"delayed": True},
        "delayed after a warm-up": {"delayed": True, "warmup_steps": warmup},
    }
    result: dict[str, Any] = {
        "preset": preset, "steps": steps, "warmup": warmup, "length": length, "lr": lr,
        "losses": {}, "curves": {}, "seconds": {},
    }  # fmt: skip
    with progress_bar(True) as report:
        total = len(kinds) * seeds
        for at, (name, options) in enumerate(kinds.items()):
            curves, seconds = [], []
            for seed in range(seeds):
                report(f"training, {name}", at * seeds + seed, total)
                losses, took = _train(
                    preset, seed, steps, length, lr, {**options, "threads": count}
                )
                curves.append(losses)
                seconds.append(took)
            result["losses"][name] = [mean(curve[-_LAST:]) for curve in curves]
            result["curves"][name] = curves
            result["seconds"][name] = median(seconds)
        result["rates"] = []
        places: list[Path | None] = [None] if spill_dir is None else [None, spill_dir]
        for where in places:
            for tile in TILES:
                report(f"tiles of {format_bytes(tile)}", len(result["rates"]), None)
                result["rates"].append(_rate(tile, elements, count, where))
    _print(result)
    return result


def _train(
    preset: str, seed: int, steps: int, length: int, lr: float, options: dict[str, Any]
) -> tuple[list[float], float]:
    """Return the loss of each step, and the median of the seconds that a step took."""
    model = zoo.build("moe", preset, seed=seed).bfloat16()
    losses, seconds = [], []
    with HostOptimizer(model.parameters(), AdamW, lr=lr, **options) as optimizer:
        for sample in islice(zoo.samples("moe", seed=seed, length=length), steps):
            start = time.perf_counter()
            loss = model(*sample.args).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss.detach()))
    return losses, median(seconds)


def _rate(tile: int, elements: int, threads: int | None, where: Path | None) -> dict[str, Any]:
    """Return what updating one parameter takes, with tiles of ``tile`` bytes of masters."""
    parameter = nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16))
    gradient = torch.full_like(parameter, 1e-3)
    options: dict[str, Any] = {"tile_bytes": tile, "threads": threads, "spill_dir": where}
    with HostOptimizer([parameter], AdamW, **options) as optimizer:
        seconds = []
        for _ in range(_ROUNDS):
            parameter.grad = gradient
            optimizer.clip_grad_norm_(1.0)  # the gradient leaves
            seconds.append(_time(optimizer.step))
        return {
            "tile_bytes": tile,
            "file": where is not None,
            "threads": optimizer.threads,
            "seconds": median(seconds),
            "elements_per_s": elements / median(seconds),
        }


def _time(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    seeds = len(result["losses"]["normal"])
    losses = Table(
        title=f"moe {result['preset']} in bfloat16, AdamW on the host, {result['steps']} steps",
        caption=f"mean loss of the last {_LAST} steps, by seed, on the same texts",
        title_justify="left",
        caption_justify="left",
    )
    losses.add_column("updates")
    for seed in range(seeds):
        losses.add_column(f"seed {seed}", justify="right")
    losses.add_column("mean", justify="right")
    losses.add_column("a step", justify="right")
    for name, values in result["losses"].items():
        losses.add_row(
            name,
            *(f"{value:.4f}" for value in values),
            f"{mean(values):.4f}",
            format_seconds(result["seconds"][name]),
        )
    console.print(losses)
    rates = Table(
        title="updates by the size of tiles", caption="median of five", title_justify="left"
    )
    for header in ("tile of masters", "states in", "threads", "seconds", "million elements/s"):
        rates.add_column(header, justify="right")
    for row in result["rates"]:
        rates.add_row(
            format_bytes(row["tile_bytes"]),
            "a file" if row["file"] else "memory",
            str(row["threads"]),
            format_seconds(row["seconds"]),
            f"{row['elements_per_s'] / 1e6:.0f}",
        )
    console.print(rates)
