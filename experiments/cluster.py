"""A 1T-parameter mixture of experts on 256 ranks: all-to-alls, uneven experts, layers in parts.

Simulates steps with `dynoffload.simulation.moe_steps` under even and skewed routing, for several
part counts and strategies; single layers by the share of time spent in communication; and the
published memory formula. Nothing is measured: networks and devices are specified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import numpy as np

from dynoffload.errors import ConfigError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Cell, Experiment, Row, option, table
from dynoffload.experiments.memory_expansion import SETTING
from dynoffload.moe.parallel.strategies import Strategy
from dynoffload.simulation.designs import DESIGNS, DEVICES_PER_NODE
from dynoffload.simulation.moe_steps import Cost, Layer, MoeSteps, cost_of, part_of
from dynoffload.simulation.ranks import Cluster, Routing, Wire
from dynoffload.simulation.roofline import Accelerator, SharedLink

GB = 1e9
PARTS = (1, 2, 4, 8)
_CUT = ("2", "4", "8")
LAYERS: dict[str, tuple[int, int]] = {
    "GPT-S": (768, 3072),
    "BERT-L": (1024, 4096),
    "GPT-XL": (2048, 8192),
}
"""Published layers: model width and an expert's inner width."""
PUBLISHED_SPEEDUP = (1.55, 1.66)
"""Mean speedups over FasterMoE (Zhang et al., 2023)."""
PUBLISHED_MEMORY: dict[str, float] = {"2": 0.23, "4": 0.34, "8": 0.38}
"""Share of memory that n parts save (ibid.)."""
SHARES = tuple(n / 10 for n in range(1, 10))
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
MEMORY_TOKENS = (4096, 8192, 16384, 32768)
DEVICE = Accelerator("assumed", 312e12, 2039e9, SharedLink(25 * GB), SharedLink(25 * GB))
"""Device of the single layers; assumed, as the paper's is not described. Half precision."""


@dataclass(frozen=True)
class Params:
    """Batches, routing, wires and single layers."""

    sequences: tuple[int, ...] = option((2, 32), "of each group of the 1T network, a step for each")
    skew: float = option(0.25, "k ** -skew as often is the k-th expert in favour chosen")
    seed: int = option(0, "of the draws")
    between_gb: float = option(50.0, "GB/s of a node's wire for each of its GPUs")
    latency_us: float = option(5.0, "microseconds of a message")
    ranks: int = option(64, "of a single layer, on one flat network")
    experts: int = option(64, "of a single layer")
    tokens: int = option(16384, "of each rank of a single layer")

    def __post_init__(self) -> None:
        counts = {"ranks": self.ranks, "experts": self.experts, "tokens": self.tokens}
        for name, value in [*counts.items(), *(("sequences", n) for n in self.sequences)]:
            if value < 1:
                raise ConfigError(f"{name}={value} is too few: take at least 1")
        if not self.sequences:
            raise ConfigError("sequences names none: give numbers, such as 2,32")
        if not (self.between_gb > 0 and 0 <= self.skew < math.inf and self.latency_us >= 0):
            raise ConfigError(
                f"between_gb={self.between_gb} must be above 0, skew={self.skew} and "
                f"latency_us={self.latency_us} 0 or more"
            )


class Clusters(Experiment[Params]):
    """A case is one batch of the 1T network on one cluster, one layer, or a sweep over layers."""

    parameters = Params

    def cases(self) -> Mapping[str, Callable[[], Row]]:
        given = self.params
        steps = {
            f"{network}, {count} sequences": partial(_steps_of, given, network, count)
            for network in ("flat", "nodes")
            for count in given.sequences
        }
        layers = {name: partial(_layer_of, given, name) for name in LAYERS}
        return {
            **steps,
            **layers,
            "batches": lambda: {"batches": _best_parts(given)},
            "memory": lambda: {"memory": _memory(given)},
        }

    def run(self, case: Callable[[], Row]) -> Row:
        return case()

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return _published(rows)

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        rows = result["rows"]
        steps = gathered(rows, "steps")
        even = [one for one in steps if (one["network"], one["routing"]) == ("nodes", "even")]
        largest = max(even, key=lambda one: one["sequences"])["rows"]
        published = {"layer": "published", "tokens": 0, "saved": PUBLISHED_MEMORY}
        return [
            table("A step of the 1T network on 256 GPUs", _STEPS, steps),
            table(
                "Every n and strategy: the largest batch on nodes, even routing",
                _STRATEGIES,
                largest,
                ["strategy"],
            ),
            table("Times the speed of the unpipelined layer", _SPEEDS, gathered(rows, "layer")),
            table(
                "GPT-XL by its batch, half of a large one on the link",
                _BATCHES,
                gathered(rows, "batches"),
            ),
            table(
                "Memory of a layer, by the formula, against one part",
                _SAVED,
                [*gathered(rows, "memory"), published],
            ),
        ]


def gathered(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the concatenated results of all cases of one kind."""
    return [one for row in rows for one in row.get(key, ())]


def _steps_of(options: Params, network: str, sequences: int) -> Row:
    """Return the steps of one network and batch, with even and with skewed routing."""
    shard = replace(SETTING, batch=replace(SETTING.batch, sequences=sequences))
    device, count = DESIGNS[4], shard.division.devices
    rate = device.network.share
    cluster = Cluster.flat(count, rate)
    if network == "nodes":
        latency = options.latency_us * 1e-6
        between = DEVICES_PER_NODE * options.between_gb * GB
        cluster = Cluster(count, DEVICES_PER_NODE, Wire(rate, latency), Wire(between, latency))
    steps, cut = MoeSteps(shard, device, cluster), shard.division
    rows, generator = shard.batch.tokens // cut.tensor, np.random.default_rng(options.seed)
    even = Routing.even(count, shard.model.experts, rows, cut.expert, cut.slices)
    routings = {
        "even": [even],
        "skewed": [even.skewed(options.skew, generator) for _ in range(shard.model.moe_layers)],
    }
    return {
        "steps": [
            {
                "network": network,
                "sequences": sequences,
                "routing": name,
                "busiest": max(map(_busiest, drawn)),
                "rows": [_step(steps, drawn, n, way) for n in PARTS for way in Strategy],
            }
            for name, drawn in routings.items()
        ]
    }


def _busiest(routing: Routing) -> float:
    """Return the maximum over the mean of the rows that ranks receive."""
    received = routing.sent().sum(axis=0)
    return float(received.max() / received.mean())


def _step(
    steps: MoeSteps, routings: Sequence[Routing], parts: int, strategy: Strategy
) -> dict[str, Any]:
    cost = steps.step(routings, parts, strategy)
    return {
        "parts": parts,
        "strategy": strategy.value,
        "seconds": cost.seconds,
        "even_s": cost.even_s,
        "experts_s": cost.experts.compute_s,
        "exposed_s": cost.exposed_s,
        "link_share": cost.link_s / cost.seconds,
        "exposed_share": cost.exposed_s / cost.seconds,
        "expert_layers_s": cost.experts.seconds,
        "bound_s": cost.experts.bound,
        "waiting_s": max(0.0, cost.experts.compute_s - cost.experts.even_s),
        "kept_gb": steps.kept_bytes(routings, parts, strategy) / GB,
    }


def _of_layer(
    name: str, options: Params, network: float, tokens: int, parts: int, strategy: Strategy
) -> Cost:
    """Return both passes of a layer on ranks that send ``network`` bytes per second."""
    ranks, experts = options.ranks, options.experts
    routing = Routing.even(ranks, experts, tokens, math.gcd(ranks, experts)).part(parts)
    cluster = Cluster.flat(ranks, network, options.latency_us * 1e-6)
    part = part_of(Layer(*LAYERS[name]), routing, DEVICE, cluster)
    return cost_of(part, parts, strategy)


def _layer(options: Params, name: str) -> list[dict[str, Any]]:
    """Return speedups of a layer in parts, by the link's share of time with one part."""
    rows = []
    free = _of_layer(name, replace(options, latency_us=0), 1e30, options.tokens, 1, Strategy.NONE)
    unit = _of_layer(name, replace(options, latency_us=0), GB, options.tokens, 1, Strategy.NONE)
    idle = 4 * options.latency_us * 1e-6  # latency of the exchanges of both passes
    for share in SHARES:
        seconds = free.compute_s * share / (1 - share) - idle
        if seconds <= 0:
            continue  # latency alone takes more
        rate = GB * unit.link_s / seconds
        plain = _of_layer(name, options, rate, options.tokens, 1, Strategy.NONE)
        found: dict[str, dict[str, float]] = {}
        for strategy in Strategy:
            found[strategy.value] = {
                str(parts): plain.seconds
                / _of_layer(name, options, rate, options.tokens, parts, strategy).seconds
                for parts in PARTS
            }
        rows.append({"share": share, "network_gb": rate / GB, "speedup": found})
    return rows


def _layer_of(options: Params, name: str) -> Row:
    return {"layer": [{"name": name, **row} for row in _layer(options, name)]}


def _best_parts(options: Params) -> list[dict[str, Any]]:
    """Return the best n of the largest layer by batch, with the link at half of its time."""
    half = next(row for row in _layer(options, "GPT-XL") if row["share"] == 0.5)
    found = []
    for tokens in TOKENS:
        times = {
            str(parts): _of_layer(
                "GPT-XL", options, half["network_gb"] * GB, tokens, parts, Strategy.NONE
            ).seconds
            for parts in PARTS
        }
        best = min(times, key=lambda parts: times[parts])
        found.append({"tokens": tokens, "best": int(best), "seconds": times})
    return found


def _memory(options: Params) -> list[dict[str, Any]]:
    """Return the share of memory that n parts save, by the formula, of states (parameters of the
    gate and of one expert, gradients and two moments), activations and buffers."""
    found = []
    for name, (width, inner) in LAYERS.items():
        layer, states = Layer(width, inner), 4.0 * (options.experts * width + 2 * inner * width)
        for tokens in MEMORY_TOKENS:
            kept = {parts: states + sum(layer.kept(tokens, parts)) for parts in PARTS}
            saved = {str(parts): 1 - kept[parts] / kept[1] for parts in PARTS[1:]}
            found.append({"layer": name, "tokens": tokens, "saved": saved})
    return found


def _published(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the numbers that compare with the paper's."""
    shown = [row for row in gathered(rows, "layer") if 0.2 - 1e-9 <= row["share"] <= 0.8 + 1e-9]
    best = [max(n for table in row["speedup"].values() for n in table.values()) for row in shown]
    memory = gathered(rows, "memory")
    return {
        "speedup": list(PUBLISHED_SPEEDUP),
        "memory": PUBLISHED_MEMORY,
        "speedup_mean": mean(best) if best else None,
        "speedup_most": max(best) if best else None,
        "memory_range": {
            parts: [
                min(row["saved"][parts] for row in memory),
                max(row["saved"][parts] for row in memory),
            ]
            for parts in PUBLISHED_MEMORY
        },
    }


def _row_of(case: Mapping[str, Any], parts: int, strategy: str) -> Mapping[str, Any]:
    """Return one step of a case."""
    return next(row for row in case["rows"] if (row["parts"], row["strategy"]) == (parts, strategy))


def _plain(case: Mapping[str, Any]) -> Mapping[str, Any]:
    return _row_of(case, 1, "none")


def _best(case: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fastest step with shared buffers."""
    shared = [row for row in case["rows"] if row["strategy"] != "none" and row["parts"] > 1]
    return min(shared, key=lambda row: row["seconds"])


def _fastest(row: Mapping[str, Any]) -> str:
    """Return the best speedup with shared buffers, with its n and strategy."""
    shared = [
        (speeds[parts], parts, strategy)
        for strategy, speeds in row["speedup"].items()
        for parts in _CUT
        if strategy != "none"
    ]
    speed, parts, strategy = max(shared, key=lambda one: one[0])
    return f"{speed:.2f} (n={parts}, {strategy})"


def _of_parts(cell: Callable[[Any, str], str]) -> dict[str, Cell]:
    """Return a column for each number of parts."""
    return {f"n={n}": lambda row, n=n: cell(row, n) for n in _CUT}  # type: ignore[misc]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


_STEPS: dict[str, Cell] = {
    "network": lambda case: case["network"],
    "sequences": lambda case: str(case["sequences"]),
    "routing (busiest rank)": lambda case: f"{case['routing']} ({case['busiest']:.1f}x)",
    "ms, n=1": lambda case: _ms(_plain(case)["seconds"]),
    "on the link": lambda case: f"{_plain(case)['link_share']:.0%}",
    "waiting": lambda case: f"{_plain(case)['waiting_s'] / _plain(case)['seconds']:.0%}",
    **_of_parts(lambda case, n: _ms(_row_of(case, int(n), "none")["seconds"])),
    "best with shared buffers": lambda case: (
        f"{_ms(_best(case)['seconds'])} (n={_best(case)['parts']}, {_best(case)['strategy']})"
    ),
    "kept GB, n=1": lambda case: f"{_plain(case)['kept_gb']:.2f}",
    "kept GB": lambda case: f"{_best(case)['kept_gb']:.2f}",
}
_STRATEGIES: dict[str, Cell] = {
    "n": lambda row: str(row["parts"]),
    "strategy": lambda row: row["strategy"],
    "step ms": lambda row: _ms(row["seconds"]),
    "expert layers ms": lambda row: _ms(row["expert_layers_s"]),
    "their bound ms": lambda row: _ms(row["bound_s"]),
    "on the link": lambda row: f"{row['link_share']:.0%}",
    "exposed": lambda row: f"{row['exposed_share']:.0%}",
    "kept GB": lambda row: f"{row['kept_gb']:.2f}",
}
_SPEEDS: dict[str, Cell] = {
    "layer": lambda row: row["name"],
    "link's share": lambda row: f"{row['share']:.0%}",
    "GB/s": lambda row: f"{row['network_gb']:.3g}",
    **_of_parts(lambda row, n: f"{row['speedup']['none'][n]:.2f}"),
    "best with shared buffers": _fastest,
}
_BATCHES: dict[str, Cell] = {
    "tokens of a rank": lambda row: f"{row['tokens']:,}",
    "ms, n=1": lambda row: f"{row['seconds']['1'] * 1e3:.2f}",
    **_of_parts(lambda row, n: f"{row['seconds'][n] * 1e3:.2f}"),
    "best n": lambda row: str(row["best"]),
}
_SAVED: dict[str, Cell] = {
    "layer": lambda row: row["layer"],
    "tokens of a rank": lambda row: f"{row['tokens']:,}" if row["tokens"] else "",
    **_of_parts(lambda row, n: f"-{row['saved'][n]:.0%}"),
}
