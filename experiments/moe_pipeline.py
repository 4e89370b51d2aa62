"""Experts over processes on slow links: parts and strategies against the layer in one part.

2 and 4 gloo processes whose exchanges are slowed to a link's rate; layers with the proportions of
GPT-S, BERT-L and GPT-XL, scaled down. Measures every number of parts and strategy, the layer's own
choice, and peaks of allocations. Ranks share the cores of one machine.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dynoffload.errors import ConfigError
from dynoffload.experiments.allocations import Allocations
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Cell, Experiment, Row, check_known, option, table
from dynoffload.experiments.processes import ONE_THREAD, at_once
from dynoffload.experiments.slow_exchange import SlowExchange
from dynoffload.memory.spill import default_spill_dir
from dynoffload.moe.parallel import ExpertParallel, Strategy
from dynoffload.moe.parallel.choice import NUMBERS
from dynoffload.moe.parallel.memory import memory, shape_of
from dynoffload.units import format_bytes, format_seconds

SIZES = {"GPT-S": (768, 3072), "BERT-L": (1024, 4096), "GPT-XL": (2048, 8192)}
"""Width and hidden width of the layers."""

PARTS = (1, 2, 4, 8)
"""Numbers of parts for which peak allocations are measured."""

Combination = tuple[int, str]
_PLAIN: Combination = (1, "none")
_FINAL = 3  # factor of steps for remeasuring the chosen and the best combination


@dataclass(frozen=True)
class Params:
    """Layers, links, and numbers of steps."""

    sizes: tuple[str, ...] = option(tuple(SIZES), "layers")
    factor: int = option(8, "by which widths are smaller")
    ranks: tuple[int, ...] = option((2,), "numbers of processes")
    mbit: tuple[float, ...] = option((50.0, 200.0, 800.0), "of links, million bits a second")
    tokens: int = option(1024, "of each rank")
    experts: int = option(16, "of all ranks")
    k: int = option(1, "experts of each token")
    activation: str = option("silu", "silu or swiglu")
    steps: int = option(9, "timed at least, of each number of parts and strategy")
    seconds: float = option(20.0, "that those of a row take at least")
    limit_share: float = option(0.6, "of what one part takes: the bound of the second choice")
    timeout: float = option(120.0, "seconds that a rank waits for others in one exchange")
    patience: float = option(7200.0, "seconds after which a row is ended", place=True)

    def __post_init__(self) -> None:
        check_known("sizes", self.sizes, SIZES)
        if self.steps < 1 or self.tokens < 1:
            raise ConfigError(f"steps={self.steps} and tokens={self.tokens} must be at least 1")


@dataclass(frozen=True)
class Task:
    """Task of one rank.

    Attributes:
        params: of the experiment.
        world: number of ranks.
        size: a key of `SIZES`.
        rate: of its link, in million bits per second; None to measure peak allocations.
        rank: of this process.
        store: file for the ranks' rendezvous.
    """

    params: Params
    world: int
    size: str
    rate: float | None
    rank: int = 0
    store: str = ""


class Pipeline(Experiment[Params]):
    """A case is a number of ranks and a layer, with peak allocations or a link rate."""

    parameters = Params

    def cases(self) -> Mapping[str, Task]:
        given = self.params
        return {
            f"{world} ranks, {size}, {'peaks' if rate is None else f'{rate:g} Mbit/s'}": Task(
                given, world, size, rate
            )
            for world in given.ranks
            for size in given.sizes
            for rate in (None, *given.mbit)
        }

    def run(self, case: Task) -> Row:
        with tempfile.TemporaryDirectory(dir=default_spill_dir()) as folder:
            found = at_once(
                f"{case.size} by {case.world}",
                rank_of,
                [replace(case, rank=n, store=f"{folder}/store") for n in range(case.world)],
                patience=self.params.patience,
                environment=ONE_THREAD,
            )
        return {"ranks": case.world, "size": case.size, **found[0]}

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        timed = [row for row in result["rows"] if "mbit" in row]
        peaks = [row for row in result["rows"] if "peaks" in row]
        params = result["params"]
        bound = f", memory at most {params['limit_share']:g} of one part that is kept"
        rows = [
            [
                f"{one['size']}, {one['ranks']} ranks",
                strategy.value,
                format_bytes(_peaks_of(one)[_PLAIN]["bytes"]),
                *(_against(_peaks_of(one), parts, strategy) for parts in PARTS),
            ]
            for one in peaks
            for strategy in Strategy
        ]
        columns = ("layer", "strategy", "one part", *(f"n = {n}" for n in PARTS))
        return [
            _table(
                f"a step of the layer in parts, {params['tokens']} tokens a rank, widths by "
                f"1/{params['factor']}",
                "free",
                timed,
            ),
            _table("the same" + bound, "bound", timed),
            f"medians of {params['steps']} or more; again: behind in steps that had no part in "
            "saying which is best",
            Table(
                "peak of allocations of a step beside one part that is kept", columns, rows, (0, 1)
            ),
            "peaks: activations and buffers; in brackets with weights, gradients and two moments",
        ]


def _table(title: str, name: str, rows: list[Row]) -> Table:
    heads: dict[str, Cell] = {
        "layer": lambda row: f"{row['size']}, {row['ranks']} ranks",
        "Mbit/s": lambda row: f"{row['mbit']:g}",
        "communication": lambda row: f"{row['communication_share']:.0%}",
        "one part": lambda row: format_seconds(_seconds_of(row)[_PLAIN]),
        "chosen": lambda row: _name(row[name]["chosen"]),
        "speedup": lambda row: f"{row[name]['speedup']:.2f}",
        "best": lambda row: _name(row[name]["best"]),
        "behind": lambda row: f"{row[name]['behind']:.1%}",
        "again": lambda row: f"{row[name]['behind_again']:+.1%}",
    }
    return table(title, heads, rows)


def _name(choice: Any) -> str:
    parts, strategy = choice
    return f"{parts}, {strategy}"


def _seconds_of(row: Mapping[str, Any]) -> dict[Combination, float]:
    return {(one["parts"], one["strategy"]): one["seconds"] for one in row["seconds"]}


def _peaks_of(row: Mapping[str, Any]) -> dict[Combination, dict[str, int]]:
    return {(one["parts"], one["strategy"]): one for one in row["peaks"]}


def _against(at: Mapping[Combination, Mapping[str, int]], parts: int, strategy: Strategy) -> str:
    one, base = at[parts, strategy.value], at[_PLAIN]
    ratio, whole = (one[key] / base[key] - 1 for key in ("bytes", "with_states"))
    return f"{ratio:+.0%} ({whole:+.0%})"


# A rank


def rank_of(task: Task) -> Row:
    """Run one rank of a case; return its row."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.store}",
        rank=task.rank,
        world_size=task.world,
        timeout=timedelta(seconds=task.params.timeout),
    )
    width, hidden = (one // task.params.factor for one in SIZES[task.size])
    layer = _layer(task, width, hidden)
    tokens = torch.randn(task.params.tokens, width)
    row: Row = {"width": width, "hidden": hidden}
    if task.rate is None:
        row["peaks"] = _peaks(layer, tokens)
    else:
        row |= {"mbit": task.rate, **_measured(task, layer, tokens)}
    dist.destroy_process_group()
    return row


def _layer(task: Task, width: int, hidden: int) -> ExpertParallel:
    torch.manual_seed(task.rank)
    given = task.params
    layer = ExpertParallel(
        width,
        hidden,
        given.experts,
        given.k,
        activation=given.activation,
        timeout=given.timeout,
        spill_dir=Path(task.store).parent,
    )
    layer.exchange = SlowExchange(timeout=given.timeout)
    if task.rate is not None:
        layer.exchange.rate = task.rate * 1e6 / 8
    return layer


def _step(layer: ExpertParallel, tokens: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of forward and backward on the slowest rank, and this rank's waits."""
    layer.zero_grad(set_to_none=True)
    given = tokens.detach().requires_grad_()
    layer.exchange.largest([0.0], tokens.device, "the others before a step")
    exchange = layer.exchange
    assert isinstance(exchange, SlowExchange)
    waited, start = exchange.waited_s, time.perf_counter()
    layer(given).hidden.backward(torch.ones_like(given))
    took, waited = time.perf_counter() - start, exchange.waited_s - waited
    return layer.exchange.largest([took], tokens.device, "times of a step")[0], waited


def _peaks(layer: ExpertParallel, tokens: torch.Tensor) -> list[dict[str, Any]]:
    """Return the peak allocation of a step, by parts and strategy."""
    rows = []
    for strategy in Strategy:
        for parts in PARTS:
            layer.set_pipeline(parts, strategy.value)
            layer.zero_grad(set_to_none=True)
            given = tokens.detach().requires_grad_()
            gc.collect()
            with Allocations() as watch:
                layer(given).hidden.backward(torch.ones_like(given))
            gradients = sum(one.numel() * one.element_size() for one in (layer.up, layer.down))
            (peak,) = layer.exchange.largest([watch.peak], tokens.device, "peaks")
            # Weights, gradients and two optimizer moments in fp32, on each rank.
            states = 16 * sum(one.numel() for one in layer.parameters())
            rows.append(
                {
                    "parts": parts,
                    "strategy": strategy.value,
                    "bytes": peak - gradients,
                    "with_states": peak - gradients + states,
                }
            )
    return rows


def _chosen(layer: ExpertParallel, tokens: torch.Tensor, bound: int | None) -> Combination:
    """Make a step in which the layer chooses, and return its choice."""
    layer.set_pipeline("auto", "auto", bound)
    _step(layer, tokens)
    return layer.choice.parts, layer.choice.strategy.value


def _measured(task: Task, layer: ExpertParallel, tokens: torch.Tensor) -> Row:
    """Make the layer choose, with and without a bound, then time every combination in turn."""
    given = task.params
    shape = shape_of(
        given.tokens, given.k, given.experts, task.world, layer.width, layer.hidden,
        layer.activation.parts, 4,
    )  # fmt: skip
    limit = int(given.limit_share * memory(Strategy.NONE, 1, shape))
    bounds = {"free": None, "bound": limit}
    chosen = {name: _chosen(layer, tokens, bound) for name, bound in bounds.items()}
    combinations: list[Combination] = [
        (parts, strategy.value)
        for strategy in Strategy
        for parts in NUMBERS
        if parts > 1 or not strategy.reuses
    ]
    times: dict[Combination, list[float]] = {
        one: [] for one in dict.fromkeys((*combinations, *chosen.values()))
    }
    waits: list[float] = []
    start, number, spent = time.monotonic(), 0, 0.0
    while number <= given.steps or spent < given.seconds:  # quick steps are timed more often
        for one in _shuffled(list(times), number):
            layer.set_pipeline(*one)
            took, waited = _step(layer, tokens)
            if number:  # the first round warms up
                times[one].append(took)
                if one == _PLAIN:
                    waits.append(waited / took)
        number += 1
        passed = [time.monotonic() - start]
        (spent,) = layer.exchange.largest(passed, tokens.device, "seconds of all steps")
    medians = {one: median(each) for one, each in times.items()}
    best = {
        name: min(
            (
                one
                for one in medians
                if bound is None or memory(Strategy(one[1]), one[0], shape) <= bound
            ),
            key=lambda one: medians[one],
        )
        for name, bound in bounds.items()
    }
    # The minimum of many medians is biased by luck. So the chosen and the best combination are
    # timed again, in steps that did not determine which is best.
    final: dict[Combination, list[float]] = {
        one: [] for one in sorted({*best.values(), *chosen.values()})
    }
    for number in range(_FINAL * given.steps):
        for one in _shuffled(list(final), number):
            layer.set_pipeline(*one)
            final[one].append(_step(layer, tokens)[0])
    return {
        "seconds": [{"parts": p, "strategy": s, "seconds": t} for (p, s), t in medians.items()],
        "communication_share": median(waits),
        "limit_bytes": limit,
        **{
            name: {
                "chosen": chosen[name],
                "chosen_s": medians[chosen[name]],
                "best": best[name],
                "best_s": medians[best[name]],
                "behind": medians[chosen[name]] / medians[best[name]] - 1,
                "behind_again": median(final[chosen[name]]) / median(final[best[name]]) - 1,
                "speedup": medians[_PLAIN] / medians[chosen[name]],
            }
            for name in bounds
        },
    }


def _shuffled(entries: list[Any], number: int) -> list[Any]:
    """Return the entries in another order each time, as a step can slow the next one."""
    random.Random(number).shuffle(entries)
    return entries
