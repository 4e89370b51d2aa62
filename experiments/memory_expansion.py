"""Four memory-expansion designs for a 1T-parameter MoE on 256 GPUs, after Heo et al. (2023).

Computes the published setting from formulas and compares it with the paper's figures. Also computes
the sensitivity to what the paper does not state, prefetched movement, and pooled memory. Nothing is
measured. Part of `SETTING` is not in the paper, and is fitted to reproduce the published figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Cell, Experiment, NoParameters, Row, table
from dynoffload.simulation.designs import (
    DESIGNS,
    STRATEGIES,
    Placement,
    local_areas,
    pooled,
    remote_areas,
)
from dynoffload.simulation.moe_cluster import Batch, Division, MoeShard, MoeTransformer
from dynoffload.simulation.movement import (
    Order,
    Segments,
    Update,
    Visit,
    ahead,
    buffer_bytes,
    in_turns,
    moved_bytes,
    partly_hidden,
    serial,
    visits,
)
from dynoffload.simulation.roofline import Accelerator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB = 1e9
PUBLISHED: dict[str, float] = {
    "ratio_design1": 2.82,
    "ratio_design4": 1.48,
    "hbm_gb.conservative": 16.3,
    "hbm_gb.aggressive": 6.25,
    "remote_gb.conservative": 72.9,
    "remote_gb.aggressive": 82.9,
    "hbm_reduction": 0.616,
}
"""JSON key -> the paper's figure."""
SEGMENTS = {
    "compute_s": ("compute", "compute"),
    "exposed_local_s": ("exposed local", "evict"),
    "exposed_communication_s": ("exposed communication", "optimizer"),
    "exposed_remote_s": ("exposed remote", "fault"),
}
"""JSON key -> label and colour, from the bottom of a bar to its top."""
LABELS = {"conservative": "C", "aggressive": "A"}
SETTING = MoeShard(
    MoeTransformer(layers=30, hidden=8192, heads=64, experts=128, vocabulary=51200),
    Division(tensor=16, data=16, expert=128, slices=2),
    Batch(sequences=2, length=2048),
)
"""Layers, width, experts and their number of devices are the paper's;
docs/results/memory-expansion.md lists what is fitted or assumed."""

BATCHES = (1, 2, 4, 8, 16)
DIVISIONS = (
    Division(8, 32, 128, 2),
    Division(16, 16, 128, 2),
    Division(32, 8, 128, 2),
    Division(16, 16, 64, 4),
    Division(16, 16, 16, 16),
    Division(16, 16, 128, 1),
)
"""All with the same total number of sequences as `SETTING`."""
SHARES = tuple(n / 8 for n in range(9))
POOLS = (4, 8, 16, 32)
STEPS_PER_UPDATE = (1, 16)


@dataclass(frozen=True)
class Schedule:
    """A movement schedule: where recomputation happens, and whether bytes move ahead of use."""

    order: Order
    ahead: bool

    def time(self, steps: list[Visit], device: Accelerator) -> Segments:
        """Return the time segments of a step."""
        return ahead(steps, device) if self.ahead else serial(steps, device)


SCHEDULES: dict[str, Schedule] = {
    "serial": Schedule(Order.SWEEPS, ahead=False),
    "overlapped": Schedule(Order.SWEEPS, ahead=True),
    "planned": Schedule(Order.BESIDE, ahead=True),
}
"""Schedule by its JSON key; the paper's is ``serial``."""


class MemoryExpansion(Experiment[NoParameters]):
    """The only case is `SETTING`."""

    height = 5.6

    def cases(self) -> Mapping[str, MoeShard]:
        return {"setting": SETTING}

    def run(self, case: MoeShard) -> Row:
        return computed(case)

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        (row,) = result["rows"]
        words = ("strategy", "movement")
        return [table(title, _COLUMNS[key], row[key], words) for key, title in _TITLES.items()]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        bars = result["rows"][0]["steps"]
        designs = list(dict.fromkeys(bar["design"] for bar in bars))
        for axes, design in zip(figure.subplots(2, 2).flat, designs, strict=True):
            mine = [bar for bar in bars if bar["design"] == design]
            mine.sort(key=lambda bar: list(SCHEDULES).index(bar["movement"]))
            labels = [f"{bar['movement']}\n{LABELS[bar['strategy']]}" for bar in mine]
            bottoms = [0.0] * len(mine)
            for key, (label, paint) in SEGMENTS.items():
                heights = [bar[key] * 1e3 for bar in mine]
                axes.bar(labels, heights, 0.86, bottoms, color=color[paint], label=label)
                bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
            for place, top in enumerate(bottoms):
                axes.annotate(f"{top:.0f}", (place, top), ha="center", va="bottom", fontsize=7.5)
            number, _, name = design.partition(" ")
            axes.set_title(f"({number}) {name}", loc="left")
            axes.set_ylabel("ms of a step")
            axes.margins(y=0.1)
            handles, named = axes.get_legend_handles_labels()
        figure.legend(handles, named, loc="outside upper center", ncols=4, frameon=False)


def computed(shard: MoeShard) -> dict[str, Any]:
    """Return all numbers for ``shard``: the rows of each table by its key."""
    return {
        "setting": {
            **asdict(shard),
            "parameters": shard.model.parameters,
            "base_parameters": shard.model.base_parameters,
        },
        "areas_gb": {
            p.name: {"local": _gb(local_areas(shard, p)), "remote": _gb(remote_areas(shard, p))}
            for p in STRATEGIES
        },
        "published": _published(shard),
        "steps": [
            {"design": f"{number} {device.name}", "strategy": p.name, "movement": name}
            | _segments(schedule.time(visits(shard, p, schedule.order), device))
            for number, device in DESIGNS.items()
            for p in STRATEGIES
            for name, schedule in SCHEDULES.items()
        ],
        "capacity": [
            {"movement": name, "strategy": p.name, **_capacity(shard, schedule, p)}
            for name, schedule in SCHEDULES.items()
            for p in STRATEGIES
        ],
        "sensitivity": sensitivity(shard),
        "planned_update": [
            _planned_update(shard, update, p) for update in Update for p in STRATEGIES
        ],
        "pooled": [_pool(shard, sharers, p) for sharers in POOLS for p in STRATEGIES],
    }


def _published(shard: MoeShard) -> list[Row]:
    """Return the paper's figures and the computed ones."""
    found = _serial(shard)
    hbm = found["hbm_gb"]
    flat = {**found, "hbm_reduction": 1 - hbm["aggressive"] / hbm["conservative"]}
    flat |= {f"{k}.{p}": n for k in ("hbm_gb", "remote_gb") for p, n in found[k].items()}
    rows: list[Row] = [
        {"key": key, "paper": f"{value:g}", "computed": f"{flat[key]:.3g}"}
        | {"deviation": flat[key] / value - 1}
        for key, value in PUBLISHED.items()
    ]
    return rows + [
        {"key": f"{key}, fastest first", "paper": "", "computed": _text(flat[key])}
        for key in ("order_conservative", "order_aggressive")
    ]


def sensitivity(shard: MoeShard) -> list[Row]:
    """Return the serial ratios and orders when one assumption changes."""
    total = shard.batch.sequences * shard.division.data
    rows = [
        {"changed": f"{n} sequence{'s' if n > 1 else ''}"}
        | _serial(replace(shard, batch=replace(shard.batch, sequences=n)))
        for n in BATCHES
    ]
    for one in DIVISIONS:
        batch = replace(shard.batch, sequences=max(1, total // one.data))
        text = f"TP{one.tensor} DP{one.data} EP{one.expert}×{one.slices}"
        rows.append({"changed": text, **_serial(replace(shard, division=one, batch=batch))})
    for share in SHARES:
        text = f"{100 * share:g}% of a step hides movement"
        rows.append({"changed": text, **_serial(shard, hidden=share)})
    for update in Update:
        for steps in (1,) if update is Update.NONE else STEPS_PER_UPDATE:
            text = "no optimizer I/O" if update is Update.NONE else update.value
            text += "" if steps == 1 else f", 1 step in {steps}"
            found = _serial(shard, update=update, steps_per_update=steps)
            rows.append({"changed": text, **found})
    return rows


def _serial(
    shard: MoeShard,
    *,
    hidden: float = 0.0,
    update: Update = Update.NONE,
    steps_per_update: int = 1,
) -> dict[str, Any]:
    """Return ratios, orders and capacities of the serial schedule."""
    seconds: dict[str, dict[int, float]] = {}
    for placement in STRATEGIES:
        plain = visits(shard, placement)
        last = visits(shard, placement, update=update)
        seconds[placement.name] = {
            number: (
                (steps_per_update - 1) * partly_hidden(serial(plain, device), hidden).total_s
                + partly_hidden(serial(last, device), hidden).total_s
            )
            / steps_per_update
            for number, device in DESIGNS.items()
        }
    first, second = (seconds[p.name] for p in STRATEGIES)
    return {
        **{f"ratio_design{number}": second[number] / first[number] for number in DESIGNS},
        "order_conservative": _order(first),
        "order_aggressive": _order(second),
        "hbm_gb": {p.name: sum(local_areas(shard, p).values()) / GB for p in STRATEGIES},
        "remote_gb": {p.name: sum(remote_areas(shard, p).values()) / GB for p in STRATEGIES},
    }


def _capacity(shard: MoeShard, schedule: Schedule, placement: Placement) -> Row:
    """Return the memory that ``schedule`` needs, and the bytes it moves."""
    steps = visits(shard, placement, schedule.order)
    buffers = buffer_bytes(steps) if schedule.ahead else 0.0
    far = remote_areas(shard, placement)
    if schedule.order is Order.BESIDE:
        del far["activations"]  # they stay local
    return {
        "hbm_gb": (sum(local_areas(shard, placement).values()) + buffers) / GB,
        "remote_gb": sum(far.values()) / GB,
        "moved_gb": moved_bytes(steps, ahead=schedule.ahead) / GB,
    }


def _planned_update(shard: MoeShard, update: Update, placement: Placement) -> Row:
    """Return local memory and times by design: planned movement, with ``update`` in each step."""
    steps = visits(shard, placement, Order.BESIDE, update)
    areas = sum(local_areas(shard, placement).values())
    return {
        "update": update.value,
        "strategy": placement.name,
        "hbm_gb": (areas + buffer_bytes(steps)) / GB,
        "seconds": {str(n): ahead(steps, device).total_s for n, device in DESIGNS.items()},
    }


def _pool(shard: MoeShard, sharers: int, placement: Placement) -> Row:
    """Return design 2's times with a pool of remote memory shared by ``sharers`` devices."""
    device, steps = pooled(sharers), visits(shard, placement)
    whole = serial(steps, device)
    return {
        "sharers": sharers,
        "strategy": placement.name,
        "gb_per_s_at_once": device.remote.share / GB,
        "at_once": whole.total_s,
        "in_turns": in_turns(whole, moved_bytes(steps), device.remote).total_s,
        "overlapped": ahead(steps, device).total_s,
        "planned": ahead(visits(shard, placement, Order.BESIDE), device).total_s,
    }


def _order(seconds: Mapping[int, float]) -> list[int]:
    """Return the designs from the fastest to the slowest; ties by descending number."""
    return sorted(seconds, key=lambda number: (round(seconds[number], 9), -number))


def _segments(segments: Segments) -> dict[str, Any]:
    return {
        "seconds": segments.total_s,
        "compute_s": segments.compute_s,
        "exposed_local_s": segments.local_s,
        "exposed_remote_s": segments.remote_s,
        "exposed_communication_s": segments.network_s,
    }


def _gb(areas: Mapping[str, float]) -> dict[str, float]:
    return {name: size / GB for name, size in areas.items()}


# Tables


def _text(designs: list[int]) -> str:
    return " ".join(map(str, designs))


def _ms(key: str) -> Cell:
    return lambda row: f"{row[key] * 1e3:.1f}"


def _update(design: int) -> Cell:
    return lambda row: f"{row['seconds'][str(design)] * 1e3:.0f}"


def _as(key: str, form: str = "") -> Cell:
    return lambda row: format(row[key], form)


_TITLES = {
    "published": "against the paper",
    "steps": "a step",
    "capacity": "capacity",
    "sensitivity": "sensitivity, serial movement",
    "planned_update": "planned movement with optimizer I/O in each step, ms",
    "pooled": "one pool for many GPUs, ms of a step",
}
_COLUMNS: dict[str, dict[str, Cell]] = {
    "published": {
        "published": _as("key"),
        "paper": _as("paper"),
        "computed": _as("computed"),
        "deviation": lambda row: f"{row['deviation']:+.1%}" if "deviation" in row else "",
    },
    "steps": {
        "design": _as("design"),
        "strategy": _as("strategy"),
        "movement": _as("movement"),
        "ms": _ms("seconds"),
        **{label: _ms(key) for key, (label, _) in SEGMENTS.items()},
    },
    "capacity": {
        "movement": _as("movement"),
        "strategy": _as("strategy"),
        **{
            head: _as(key, ".2f")
            for head, key in (
                ("local GB", "hbm_gb"),
                ("remote GB", "remote_gb"),
                ("moved GB", "moved_gb"),
            )
        },
    },
    "sensitivity": {
        "changed": _as("changed"),
        "ratio 1": _as("ratio_design1", ".2f"),
        "ratio 4": _as("ratio_design4", ".2f"),
        "order C": lambda row: _text(row["order_conservative"]),
        "order A": lambda row: _text(row["order_aggressive"]),
        "local GB C": lambda row: f"{row['hbm_gb']['conservative']:.1f}",
        "A": lambda row: f"{row['hbm_gb']['aggressive']:.1f}",
    },
    "planned_update": {
        "optimizer I/O": _as("update"),
        "strategy": _as("strategy"),
        "local GB": _as("hbm_gb", ".2f"),
        **{f"design {n}": _update(n) for n in DESIGNS},
    },
    "pooled": {
        "GPUs": _as("sharers"),
        "strategy": _as("strategy"),
        "GB/s at once": _as("gb_per_s_at_once", ".0f"),
        **{
            key.replace("_", " "): _ms(key)
            for key in ("at_once", "in_turns", "overlapped", "planned")
        },
    },
}
