"""One rank of the experiment ``moe-pipeline``: a program that takes a task and prints rows.

What it is: the layer, its steps by every number of parts and strategy in turn, its own choice, and
its allocations. What it is not: the processes around it (`dynoffload.experiments.moe_pipeline`).
"""

from __future__ import annotations

import gc
import json
import os
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
from dynoffload.moe.parallel.cost import memory, shape_of

PARTS = (1, 2, 4, 8)
Combination = tuple[int, str]


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
        steps: timed, of each combination.
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
    if task.rank == 0:
        print(json.dumps(what), flush=True)  # noqa: T201


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


def _measured(task: Task, layer: ExpertParallel, tokens: torch.Tensor) -> dict[str, Any]:
    """Time every combination in turn, then let the layer choose, with and without a bound."""
    combinations: list[Combination] = [
        (parts, strategy.value)
        for strategy in Strategy
        for parts in PARTS
        if parts > 1 or not strategy.reuses
    ]
    shape = shape_of(
        task.tokens, task.k, task.experts, task.world, layer.width, layer.hidden,
        layer.activation.parts, 4,
    )  # fmt: skip
    limit = int(task.limit_share * memory(Strategy.NONE, 1, shape))
    choices, shares = {}, {}
    for name, bound in (("free", None), ("bound", limit)):
        layer.set_pipeline("auto", "auto", bound)
        _step(layer, tokens)
        adapting = layer.adapting
        if adapting is None or adapting.chooser is None:
            raise AssertionError("a layer that was to choose has not")
        choices[name] = (layer.choice.parts, layer.choice.strategy.value)
        (seconds,) = layer.exchange.largest([adapting.seconds], tokens.device, "seconds of trials")
        shares[name] = (seconds, adapting.chooser.trials)
        if choices[name] not in combinations:
            combinations.append(choices[name])
    times: dict[Combination, list[float]] = {one: [] for one in combinations}
    waits = []
    for number in range(task.steps + 1):
        for one in combinations:
            layer.set_pipeline(*one)
            took, waited = _step(layer, tokens)
            if number:  # the first round warms up
                times[one].append(took)
                if one == (1, "none"):
                    waits.append(waited / took)
    medians = {one: median(took) for one, took in times.items()}
    found: dict[str, Any] = {
        "seconds": [{"parts": p, "strategy": s, "seconds": t} for (p, s), t in medians.items()],
        "communication_share": median(waits),
        "limit_bytes": limit,
    }
    for name, bound in (("free", None), ("bound", limit)):
        fits = {
            one: took
            for one, took in medians.items()
            if bound is None or memory(Strategy(one[1]), one[0], shape) <= bound
        }
        best = min(fits, key=lambda one: fits[one])
        chosen = choices[name]
        found[name] = {
            "chosen": chosen,
            "chosen_s": medians[chosen],
            "best": best,
            "best_s": medians[best],
            "behind": medians[chosen] / medians[best] - 1,
            "speedup": medians[1, "none"] / medians[chosen],
            "profile_s": shares[name][0],
            "trials": shares[name][1],
            "profile_share": shares[name][0] / (1000 * medians[chosen]),
        }
    return found


if __name__ == "__main__":
    main()
