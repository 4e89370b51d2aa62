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
from dynoffload.experiments.harness import Experiment, NoParameters, Row
from dynoffload.simulation.designs import (
    AGGRESSIVE,
    CONSERVATIVE,
    DESIGNS,
    STRATEGIES,
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
        makers = (_published_table, _steps, _capacity, _sensitivity, _planned_updates, _pools)
        return [make(row) for make in makers]

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        (row,) = result["rows"]
        panels = figure.subplots(2, 2).flat
        for axes, (number, design) in zip(panels, row["designs"].items(), strict=True):
            labels, bottoms = [], [0.0] * len(LABELS) * len(SCHEDULES)
            for schedule in SCHEDULES:
                labels += [f"{schedule}\n{letter}" for letter in LABELS.values()]
            for key, (label, paint) in SEGMENTS.items():
                heights = [
                    design[strategy][schedule][key] * 1e3
                    for schedule in SCHEDULES
                    for strategy in LABELS
                ]
                axes.bar(labels, heights, 0.86, bottoms, color=color[paint], label=label)
                bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
            for place, top in enumerate(bottoms):
                axes.annotate(f"{top:.0f}", (place, top), ha="center", va="bottom", fontsize=7.5)
            axes.set_title(f"({number}) {design['name']}", loc="left")
            axes.set_ylabel("ms of a step")
            axes.margins(y=0.1)
            handles, named = axes.get_legend_handles_labels()
        figure.legend(handles, named, loc="outside upper center", ncols=4, frameon=False)


def computed(shard: MoeShard) -> dict[str, Any]:
    """Return all numbers for ``shard``."""
    times = {
        name: {
            placement.name: {
                number: schedule.time(visits(shard, placement, schedule.order), device)
                for number, device in DESIGNS.items()
            }
            for placement in STRATEGIES
        }
        for name, schedule in SCHEDULES.items()
    }
    paper = times["serial"]
    hbm = {p.name: sum(local_areas(shard, p).values()) / GB for p in STRATEGIES}
    result: dict[str, Any] = {
        **{f"ratio_design{number}": _ratio(paper, number) for number in DESIGNS},
        "order_conservative": _order(_totals(paper[CONSERVATIVE.name])),
        "order_aggressive": _order(_totals(paper[AGGRESSIVE.name])),
        "hbm_gb": hbm,
        "remote_gb": {p.name: sum(remote_areas(shard, p).values()) / GB for p in STRATEGIES},
        "hbm_reduction": 1 - hbm[AGGRESSIVE.name] / hbm[CONSERVATIVE.name],
    }
    result["published"] = {
        key: {"value": value, "deviation": _at(result, key) / value - 1}
        for key, value in PUBLISHED.items()
    }
    return {
        **result,
        "setting": {
            **asdict(shard),
            "parameters": shard.model.parameters,
            "base_parameters": shard.model.base_parameters,
        },
        "areas_gb": {
            p.name: {"local": _gb(local_areas(shard, p)), "remote": _gb(remote_areas(shard, p))}
            for p in STRATEGIES
        },
        "designs": {
            str(number): {
                "name": device.name,
                **{
                    p.name: {name: _segments(times[name][p.name][number]) for name in SCHEDULES}
                    for p in STRATEGIES
                },
            }
            for number, device in DESIGNS.items()
        },
        "schedules": {
            name: _schedule(shard, schedule, times[name]) for name, schedule in SCHEDULES.items()
        },
        "sensitivity": sensitivity(shard),
        "planned_update": [_planned_update(shard, update) for update in Update],
        "pooled": [_pool(shard, sharers) for sharers in POOLS],
    }


def sensitivity(shard: MoeShard) -> dict[str, list[dict[str, Any]]]:
    """Return the serial ratios and times of designs 1 and 4 when one assumption changes."""
    total = shard.batch.sequences * shard.division.data
    found: dict[str, list[dict[str, Any]]] = {
        "batch": [
            {"sequences": n, **_row(replace(shard, batch=replace(shard.batch, sequences=n)))}
            for n in BATCHES
        ],
        "parallelism": [
            {
                **asdict(division),
                **_row(replace(shard, division=division, batch=_batch(shard, division, total))),
            }
            for division in DIVISIONS
        ],
        "overlap": [{"share": share, **_row(shard, hidden=share)} for share in SHARES],
        "update": [],
    }
    for update in Update:
        for steps in (1,) if update is Update.NONE else STEPS_PER_UPDATE:
            row = _row(shard, update=update, steps_per_update=steps)
            found["update"].append({"update": update.value, "steps_per_update": steps, **row})
    return found


def _row(
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


def _batch(shard: MoeShard, division: Division, sequences: int) -> Batch:
    """Return a batch with one data-parallel group's share of ``sequences``."""
    return replace(shard.batch, sequences=max(1, sequences // division.data))


def _schedule(
    shard: MoeShard, schedule: Schedule, times: Mapping[str, Mapping[int, Segments]]
) -> dict[str, Any]:
    """Return the ratios and orders under ``schedule``, and the memory it needs."""
    hbm, remote, moved = {}, {}, {}
    for placement in STRATEGIES:
        steps = visits(shard, placement, schedule.order)
        areas = local_areas(shard, placement)
        buffers = buffer_bytes(steps) if schedule.ahead else 0.0
        hbm[placement.name] = (sum(areas.values()) + buffers) / GB
        far = remote_areas(shard, placement)
        if schedule.order is Order.BESIDE:
            del far["activations"]  # they stay local
        remote[placement.name] = sum(far.values()) / GB
        moved[placement.name] = moved_bytes(steps, ahead=schedule.ahead) / GB
    return {
        **{f"ratio_design{number}": _ratio(times, number) for number in DESIGNS},
        "order_conservative": _order(_totals(times[CONSERVATIVE.name])),
        "order_aggressive": _order(_totals(times[AGGRESSIVE.name])),
        "hbm_gb": hbm,
        "remote_gb": remote,
        "moved_gb": moved,
    }


def _planned_update(shard: MoeShard, update: Update) -> dict[str, Any]:
    """Return local memory and times by design: planned movement, with ``update`` in each step."""
    row: dict[str, Any] = {"update": update.value}
    for placement in STRATEGIES:
        steps = visits(shard, placement, Order.BESIDE, update)
        areas = sum(local_areas(shard, placement).values())
        row[placement.name] = {
            "hbm_gb": (areas + buffer_bytes(steps)) / GB,
            "seconds": {str(n): ahead(steps, device).total_s for n, device in DESIGNS.items()},
        }
    return row


def _pool(shard: MoeShard, sharers: int) -> dict[str, Any]:
    """Return design 2's times with a pool of remote memory shared by ``sharers`` devices."""
    device = pooled(sharers)
    row: dict[str, Any] = {
        "sharers": sharers,
        "gb_per_s_at_once": device.remote.share / GB,
    }
    for placement in STRATEGIES:
        steps = visits(shard, placement)
        whole = serial(steps, device)
        row[placement.name] = {
            "at_once": _segments(whole),
            "in_turns": _segments(in_turns(whole, moved_bytes(steps), device.remote)),
            "overlapped": _segments(ahead(steps, device)),
            "planned": _segments(ahead(visits(shard, placement, Order.BESIDE), device)),
        }
    return row


def _ratio(times: Mapping[str, Mapping[int, Segments]], number: int) -> float:
    return times[AGGRESSIVE.name][number].total_s / times[CONSERVATIVE.name][number].total_s


def _order(seconds: Mapping[int, float]) -> list[int]:
    """Return the designs from the fastest to the slowest; ties by descending number."""
    return sorted(seconds, key=lambda number: (round(seconds[number], 9), -number))


def _totals(times: Mapping[int, Segments]) -> dict[int, float]:
    return {number: segments.total_s for number, segments in times.items()}


def _segments(segments: Segments) -> dict[str, float]:
    return {
        "seconds": segments.total_s,
        "compute_s": segments.compute_s,
        "exposed_local_s": segments.local_s,
        "exposed_remote_s": segments.remote_s,
        "exposed_communication_s": segments.network_s,
    }


def _gb(areas: Mapping[str, float]) -> dict[str, float]:
    return {name: size / GB for name, size in areas.items()}


def _at(result: Mapping[str, Any], key: str) -> float:
    found: Any = result
    for part in key.split("."):
        found = found[part]
    return float(found)


# Tables


def _published_table(result: Mapping[str, Any]) -> Table:
    rows = []
    for key, row in result["published"].items():
        value = row["value"]
        rows.append(
            [key, f"{value:g}", f"{value * (1 + row['deviation']):.3g}", f"{row['deviation']:+.1%}"]
        )
    for key in ("order_conservative", "order_aggressive"):
        rows.append([f"{key}, fastest first", "", _text(result[key]), ""])
    return Table("against the paper", ("published", "paper", "computed", "deviation"), rows)


def _steps(result: Mapping[str, Any]) -> Table:
    columns = ("design", "strategy", "movement", "ms", *(label for label, _ in SEGMENTS.values()))
    rows = [
        [
            f"{number} {design['name']}",
            strategy,
            name,
            *(f"{bar[key] * 1e3:.1f}" for key in ("seconds", *SEGMENTS)),
        ]
        for number, design in result["designs"].items()
        for strategy in LABELS
        for name, bar in design[strategy].items()
    ]
    return Table("a step", columns, rows, (0, 1, 2))


def _capacity(result: Mapping[str, Any]) -> Table:
    rows = [
        [
            name,
            strategy,
            *(f"{schedule[key][strategy]:.2f}" for key in ("hbm_gb", "remote_gb", "moved_gb")),
        ]
        for name, schedule in result["schedules"].items()
        for strategy in LABELS
    ]
    columns = ("movement", "strategy", "local GB", "remote GB", "moved GB")
    return Table("capacity", columns, rows, (0, 1))


def _sensitivity(result: Mapping[str, Any]) -> Table:
    columns = ("changed", "ratio 1", "ratio 4", "order C", "order A", "local GB C", "A")
    rows = [
        [
            changed(row),
            f"{row['ratio_design1']:.2f}",
            f"{row['ratio_design4']:.2f}",
            _text(row["order_conservative"]),
            _text(row["order_aggressive"]),
            *(f"{row['hbm_gb'][strategy]:.1f}" for strategy in LABELS),
        ]
        for rows in result["sensitivity"].values()
        for row in rows
    ]
    return Table("sensitivity, serial movement", columns, rows)


def _planned_updates(result: Mapping[str, Any]) -> Table:
    columns = ("optimizer I/O", "strategy", "local GB", *(f"design {n}" for n in result["designs"]))
    rows = [
        [
            row["update"],
            strategy,
            f"{row[strategy]['hbm_gb']:.2f}",
            *(f"{seconds * 1e3:.0f}" for seconds in row[strategy]["seconds"].values()),
        ]
        for row in result["planned_update"]
        for strategy in LABELS
    ]
    return Table("planned movement with optimizer I/O in each step, ms", columns, rows, (0, 1))


def _pools(result: Mapping[str, Any]) -> Table:
    columns = ("GPUs", "strategy", "GB/s at once", "at once", "in turns", "overlapped", "planned")
    rows = [
        [
            str(row["sharers"]),
            strategy,
            f"{row['gb_per_s_at_once']:.0f}",
            *(f"{bar['seconds'] * 1e3:.1f}" for bar in row[strategy].values()),
        ]
        for row in result["pooled"]
        for strategy in LABELS
    ]
    return Table("one pool for many GPUs, ms of a step", columns, rows, (1,))


def changed(row: Mapping[str, Any]) -> str:
    """Return a row's changed assumption, in words."""
    if "sequences" in row:
        count = row["sequences"]
        return f"{count} sequence{'s' if count > 1 else ''}"
    if "share" in row:
        return f"{100 * row['share']:g}% of a step hides movement"
    if "tensor" in row:
        return f"TP{row['tensor']} DP{row['data']} EP{row['expert']}×{row['slices']}"
    update, steps = row["update"], row["steps_per_update"]
    if update == "none":
        return "no optimizer I/O"
    return update if steps == 1 else f"{update}, 1 step in {steps}"


def _text(designs: list[int]) -> str:
    return " ".join(map(str, designs))
