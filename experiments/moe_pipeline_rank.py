"""One rank of the experiment ``moe-pipeline``: a program that takes a task and prints rows.

What it is: the layer, its steps until it has chosen, its steps by every number of parts and
strategy in turn, and its allocations. What it is not: the processes around it
(`dynoffload.experiments.moe_pipeline`).
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dynoffload.experiments.allocations import Allocations
from dynoffload.experiments.networks import DEVICE, SlowExchange, limit_link
from dynoffload.moe.parallel import ExpertParallel, Strategy
from dynoffload.moe.parallel.choice import NUMBERS
from dynoffload.moe.parallel.memory import memory, shape_of

PARTS = (1, 2, 4, 8)
"""Of which peaks of allocations are told."""

Combination = tuple[int, str]
_FINAL = 3  # times as many steps, of what was chosen and what was best
ALIVE_S = 5.0
"""At most so long after another line a rank that works says one, or as soon as a step is made."""

_LONGEST = 1000  # steps within which a race has to end


@dataclass(frozen=True)
class Task:
    """What one rank does.

    Attributes:
        rank: of this process.
        world: ranks.
        store: a file by which they meet.
        sizes: name, width and hidden width of each layer.
        rates: of links, in million bits a second.
        tokens: of each rank.
        experts: of all ranks.
        k: of each token.
        activation: of the experts.
        steps: timed at least, of each combination.
        seconds: that all these take at least: quick steps are timed more often.
        limit_share: of the memory of one part that is kept: the bound of the second choice.
        namespaces: links are those of a namespace, and not delays.
        timeout: seconds.
    """

    rank: int
    world: int
    store: str
    sizes: list[tuple[str, int, int]]
    rates: list[float]
    tokens: int
    experts: int
    k: int
    activation: str
    steps: int
    seconds: float
    limit_share: float
    namespaces: bool
    timeout: float


def main() -> None:
    """Carry out the task in the first argument; rank 0 prints a JSON object a line."""
    task = Task(**json.loads(sys.argv[1]))
    if task.namespaces:
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.store}",
        rank=task.rank,
        world_size=task.world,
        timeout=timedelta(seconds=task.timeout),
    )
    for name, width, hidden in task.sizes:
        layer = _layer(task, width, hidden)
        tokens = torch.randn(task.tokens, width)
        _say(task, {"memory": {"size": name, "rows": _memories(task, layer, tokens)}})
        for rate in task.rates:
            _limit(task, layer, rate)
            row = {"ranks": task.world, "size": name, "width": width, "hidden": hidden}
            _say(task, {"row": {**row, "mbit": rate, **_measured(task, layer, tokens)}})
    dist.destroy_process_group()


def _say(task: Task, what: dict[str, Any]) -> None:
    global _said
    if task.rank == 0:
        print(json.dumps(what), flush=True)  # noqa: T201
    _said = time.monotonic()


_said = 0.0


def _say_alive(task: Task) -> None:
    if time.monotonic() - _said > ALIVE_S:
        _say(task, {"alive": True})


def _layer(task: Task, width: int, hidden: int) -> ExpertParallel:
    torch.manual_seed(task.rank)
    layer = ExpertParallel(
        width,
        hidden,
        task.experts,
        task.k,
        activation=task.activation,
        timeout=task.timeout,
        spill_dir=Path(task.store).parent,
    )
    if not task.namespaces:
        layer.exchange = SlowExchange(timeout=task.timeout)
    return layer


def _limit(task: Task, layer: ExpertParallel, rate: float) -> None:
    if isinstance(layer.exchange, SlowExchange):
        layer.exchange.rate = rate * 1e6 / 8
    else:
        limit_link(rate)


def _step(layer: ExpertParallel, tokens: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of a forward and backward on the slowest rank, and of this one's waits."""
    layer.zero_grad(set_to_none=True)
    given = tokens.detach().requires_grad_()
    layer.exchange.largest([0.0], tokens.device, "the others before a step")
    waited, start = layer.exchange.waited_s, time.perf_counter()
    layer(given).hidden.backward(torch.ones_like(given))
    took, waited = time.perf_counter() - start, layer.exchange.waited_s - waited
    return layer.exchange.largest([took], tokens.device, "times of a step")[0], waited


def _memories(task: Task, layer: ExpertParallel, tokens: torch.Tensor) -> list[dict[str, Any]]:
    """Return the peak of what a step allocates, by parts and strategy."""
    rows = []
    for strategy in Strategy:
        for parts in PARTS:
            layer.set_pipeline(parts, strategy.value)
            _say_alive(task)
            layer.zero_grad(set_to_none=True)
            given = tokens.detach().requires_grad_()
            gc.collect()
            with Allocations() as watch:
                layer(given).hidden.backward(torch.ones_like(given))
            gradients = sum(one.numel() * one.element_size() for one in (layer.up, layer.down))
            (peak,) = layer.exchange.largest([watch.peak], tokens.device, "peaks")
            # Weights, gradients and two moments of an optimizer of fp32, on each rank.
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


def _raced(
    task: Task, layer: ExpertParallel, tokens: torch.Tensor, bound: int | None
) -> dict[str, Any]:
    """Make steps until the layer has chosen, and return the choice and what these took."""
    layer.set_pipeline("auto", "auto", bound)
    took: list[float] = []
    while layer.adapting is None or not layer.adapting.settled:
        if len(took) == _LONGEST:
            raise AssertionError("a layer that was to choose has not")
        took.append(_step(layer, tokens)[0])
        _say_alive(task)
    return {
        "chosen": (layer.choice.parts, layer.choice.strategy.value),
        "steps": len(took),
        "steps_s": sum(took),
    }


def _measured(task: Task, layer: ExpertParallel, tokens: torch.Tensor) -> dict[str, Any]:
    """Let the layer choose, with and without a bound, then time every combination in turn."""
    combinations: list[Combination] = [
        (parts, strategy.value)
        for strategy in Strategy
        for parts in NUMBERS
        if parts > 1 or not strategy.reuses
    ]
    shape = shape_of(
        task.tokens, task.k, task.experts, task.world, layer.width, layer.hidden,
        layer.activation.parts, 4,
    )  # fmt: skip
    limit = int(task.limit_share * memory(Strategy.NONE, 1, shape))
    raced = {}
    for name, bound in (("free", None), ("bound", limit)):
        raced[name] = _raced(task, layer, tokens, bound)
        if raced[name]["chosen"] not in combinations:
            combinations.append(raced[name]["chosen"])
    plain: Combination = (1, "none")
    # The same once more, as if they were others: how far two entries are apart is the noise.
    again = sorted({plain, *(one["chosen"] for one in raced.values())})
    entries = [(one, False) for one in combinations] + [(one, True) for one in again]
    times: dict[tuple[Combination, bool], list[float]] = {one: [] for one in entries}
    waits: list[float] = []
    start, number, spent = time.monotonic(), 0, 0.0
    while number <= task.steps or spent < task.seconds:
        order = list(entries)  # another one each time, as a step can slow the next one
        random.Random(number).shuffle(order)
        for one in order:
            layer.set_pipeline(*one[0])
            took, waited = _step(layer, tokens)
            _say_alive(task)
            if number:  # the first round warms up
                times[one].append(took)
                if one == (plain, False):
                    waits.append(waited / took)
        number += 1
        passed = [time.monotonic() - start]
        (spent,) = layer.exchange.largest(passed, tokens.device, "seconds of all steps")
    medians = {one: median(times[one, False]) for one in combinations}
    repeated = {one: median(times[one, True]) for one in again}
    found: dict[str, Any] = {
        "seconds": [{"parts": p, "strategy": s, "seconds": t} for (p, s), t in medians.items()],
        "again": [{"parts": p, "strategy": s, "seconds": t} for (p, s), t in repeated.items()],
        "rounds": number - 1,
        "noise": max(abs(took / medians[one] - 1) for one, took in repeated.items()),
        "communication_share": median(waits),
        "limit_bytes": limit,
    }
    best_of = {}
    for name, bound in (("free", None), ("bound", limit)):
        fits = {
            one: took
            for one, took in medians.items()
            if bound is None or memory(Strategy(one[1]), one[0], shape) <= bound
        }
        best_of[name] = min(fits, key=lambda one: fits[one])
    # Of many medians the least is the luckiest, too: so what was chosen and what was best are
    # timed once more, in steps that had no part in saying which is best.
    finalists = sorted({*best_of.values(), *(one["chosen"] for one in raced.values())})
    final: dict[Combination, list[float]] = {one: [] for one in finalists}
    for number in range(_FINAL * task.steps):
        order = list(finalists)
        random.Random(number).shuffle(order)
        for one in order:
            layer.set_pipeline(*one)
            final[one].append(_step(layer, tokens)[0])
            _say_alive(task)
    for name, best in best_of.items():
        race = raced[name]
        chosen_s = medians[race["chosen"]]
        # What the choice cost: steps until it stood, beyond as many steps of what was chosen.
        overhead = race["steps_s"] - race["steps"] * chosen_s
        found[name] = {
            **race,
            "chosen_s": chosen_s,
            "best": best,
            "best_s": medians[best],
            "behind": chosen_s / medians[best] - 1,
            "behind_again": median(final[race["chosen"]]) / median(final[best]) - 1,
            "speedup": medians[plain] / chosen_s,
            "overhead_share": overhead / (1000 * chosen_s),
        }
    return found


if __name__ == "__main__":
    main()
