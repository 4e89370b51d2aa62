"""How well pilots predict block orders, over the whole zoo, on sources they have not seen.

Every network of the zoo whose steps differ is trained and recorded, at several seeds: of weights,
samples, the held-out split, and the pilots. A pilot is trained on three quarters of the sources and
scored on the rest, next to the baselines. Accuracy is 1 - Levenshtein distance / longer order, mean
over samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Cell, Experiment, Row, check_known, option, table
from dynoffload.experiments.pilot_recording import CASES, DATA, STRUCTURE, record
from dynoffload.experiments.pilot_scores import BASELINES, scores
from dynoffload.experiments.processes import ONE_THREAD, fresh
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 16  # minimum samples of a network
STRUCTURE_ORDER, STRUCTURE_WHOLE = 0.99, 0.95
"""Targets where the sample determines the path: block-order accuracy with online correction, and
share of exactly right orders."""
DATA_ORDER, DATA_AHEAD = 0.90, 0.97
"""Targets where the network's computation determines the path: accuracy at the start of the step,
and one block ahead."""
LATENCY_S, ARTIFACT_BYTES = 1e-3, 5_000_000
"""Limits of one prediction's time and of a stored pilot's size."""
_NUMBERS = {
    "order": ("steering", "block_order_accuracy"),
    "whole_order": ("steering", "whole_order"),
    "varying": ("steering", "varying_order"),
    "alone": ("block_order_accuracy",),
    "one_ahead": ("one_ahead",),
    "latency_s": ("latency_s",),
    "artifact_bytes": ("artifact_bytes",),
    "training_s": ("training_s",),
}
"""Number -> its path in a pilot's scores."""
_ASKED = {
    STRUCTURE: f"structure that the sample shows: order at least {STRUCTURE_ORDER:.0%} and whole "
    f"order at least {STRUCTURE_WHOLE:.0%}",
    DATA: f"decided by what the network computes: order at least {DATA_ORDER:.0%} at the start and "
    f"{DATA_AHEAD:.0%} one block ahead, with routers' decisions known",
    "beats_baselines": "better than every baseline, before the first operator and at each seed, "
    "where there is more than one path",
    "costs": f"the median prediction at most {format_seconds(LATENCY_S)}, stored in at most "
    f"{ARTIFACT_BYTES / 1e6:.0f} MB",
}
_SHADES = {"last_order": "fault", "most_frequent": "rss"}


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    only: tuple[str, ...] = option((), "networks, by key; all by default")
    seeds: int = option(3, "how many, from 0")
    samples: int = option(480, "recorded steps of each network, fewer where one takes long")


class PilotAccuracy(Experiment[Params]):
    """A case is a network at a seed, in its own process."""

    parameters = Params
    height = 7.0

    def cases(self) -> Mapping[str, tuple[str, int]]:
        own = self.params
        check_known("only", own.only, CASES)
        if own.seeds < 1 or own.samples < _LEAST:
            raise ConfigError(
                f"seeds={own.seeds} and samples={own.samples} are too few: take at least 1 and "
                f"{_LEAST}"
            )
        return {
            f"{key}, seed {seed}": (key, seed)
            for seed in range(own.seeds)
            for key in own.only or CASES
        }

    def run(self, case: tuple[str, int]) -> Row:
        key, seed = case
        samples = max(_LEAST, round(CASES[key].share * self.params.samples))
        return fresh(key, _scored, key, samples, seed, environment=ONE_THREAD)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        networks = {
            key: judged(CASES[key].origin, [row for row in rows if row["network"] == key])
            for key in dict.fromkeys(row["network"] for row in rows)
        }
        return {"networks": networks, "asked": asked(networks)}

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        found = result["summary"]
        rows = [{"key": key, **one} for key, one in found["networks"].items()]
        parts: list[Table | str] = [
            table("accuracy", _ACCURACY, rows, words=("asked",)),
        ]
        for key, text in _ASKED.items():
            one = found["asked"][key]
            missed = ", ".join(CASES[network].title for network in one["missed"])
            where = f"; not: {missed}" if missed else ""
            parts.append(f"{text}: {one['held']} of {one['networks']}{where}")
        return parts

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        networks = result["summary"]["networks"]
        shown = {
            **{
                name.replace("_", " "): (
                    shade,
                    [one["baselines"][name] for one in networks.values()],
                )
                for name, shade in _SHADES.items()
            },
            "pilot, at the start": ("plan", [one["pilot"]["order"] for one in networks.values()]),
            "decision known": (
                "optimizer",
                [one["pilot"]["one_ahead"] for one in networks.values()],
            ),
        }
        axes = figure.subplots()
        for (label, (shade, spreads)), mark in zip(shown.items(), "vsoD", strict=True):
            means = [one["mean"] for one in spreads]
            off = [
                [abs(one[end] - one["mean"]) for one in spreads]  # over the seeds
                for end in ("min", "max")
            ]
            axes.errorbar(
                means,
                range(len(means)),
                xerr=off,
                fmt=mark,
                color=color[shade],
                markersize=4.5,
                linewidth=1,
                label=label,
            )
        axes.set_yticks(range(len(networks)), [CASES[key].title for key in networks])
        axes.invert_yaxis()
        axes.grid(visible=True, axis="both")
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("block-order accuracy on held-out samples")
        figure.legend(loc="outside upper center", ncols=5, frameon=False)


def _scored(key: str, samples: int, seed: int) -> Row:
    return {"network": key, "seed": seed, **scores(record(CASES[key], samples, seed), seed)}


def judged(origin: str, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a network's numbers as mean, minimum and maximum over its seeds, and its verdicts.

    Args:
        origin: where its paths come from: `STRUCTURE` or `DATA`.
        seeds: results of `dynoffload.experiments.pilot_scores.scores`, at least one.
    """
    pilot = {
        key: _spread(_at(one["pilot"], path) for one in seeds) for key, path in _NUMBERS.items()
    }
    order, whole, ahead = (
        fmean(_at(one["pilot"], _NUMBERS[key]) for one in seeds)
        for key in ("order", "whole_order", "one_ahead")
    )
    if origin == STRUCTURE:
        reached = order >= STRUCTURE_ORDER and whole >= STRUCTURE_WHOLE
    else:
        reached = order >= DATA_ORDER and ahead >= DATA_AHEAD
    beats = [
        _at(one["pilot"], _NUMBERS["order"])
        > max(one["baselines"][name]["block_order_accuracy"] for name in BASELINES)
        for one in seeds
    ]
    return {
        "paths": _spread(one["paths"] for one in seeds),
        "pilot": pilot,
        "baselines": {
            name: _spread(one["baselines"][name]["block_order_accuracy"] for one in seeds)
            for name in BASELINES
        },
        "reached": reached,
        "beats_baselines": all(beats) if max(one["paths"] for one in seeds) > 1 else None,
        "costs": max(one["pilot"]["latency_s"] for one in seeds) <= LATENCY_S
        and max(one["pilot"]["artifact_bytes"] for one in seeds) <= ARTIFACT_BYTES,
    }


def asked(networks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return for each target how many networks reach it, and which do not."""
    held: dict[str, dict[str, bool]] = {
        origin: {
            key: one["reached"] for key, one in networks.items() if CASES[key].origin == origin
        }
        for origin in (STRUCTURE, DATA)
    }
    for what in ("beats_baselines", "costs"):
        held[what] = {key: one[what] for key, one in networks.items() if one[what] is not None}
    return {
        what: {
            "networks": len(found),
            "held": sum(found.values()),
            "missed": [key for key, one in found.items() if not one],
        }
        for what, found in held.items()
    }


def _at(found: Mapping[str, Any], path: Iterable[str]) -> Any:
    value: Any = found
    for key in path:
        value = value[key]
    return value


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean, minimum and maximum; None if there are no numbers."""
    there = [value for value in values if value is not None]
    return {"mean": fmean(there), "min": min(there), "max": max(there)} if there else None


def _share(found: Mapping[str, float] | None) -> str:
    """Return a mean share in percent, with half of its range over the seeds if that is visible."""
    if found is None:
        return "–"
    half = (found["max"] - found["min"]) / 2
    return f"{found['mean']:.1%}" + (f" ±{100 * half:.1f}" if half > 5e-4 else "")


def _asked(row: Mapping[str, Any]) -> str:
    lost = ", no better than a baseline at some seed" if row["beats_baselines"] is False else ""
    return ("reached" if row["reached"] else "missed") + lost


_ACCURACY: dict[str, Cell] = {
    "network": lambda row: CASES[row["key"]].title,
    "paths": lambda row: f"{row['paths']['mean']:.0f}",
    "order": lambda row: _share(row["pilot"]["order"]),
    "whole order": lambda row: _share(row["pilot"]["whole_order"]),
    "varying": lambda row: _share(row["pilot"]["varying"]),
    "alone": lambda row: _share(row["pilot"]["alone"]),
    "decision known": lambda row: _share(row["pilot"]["one_ahead"]),
    "last order": lambda row: _share(row["baselines"]["last_order"]),
    "most frequent": lambda row: _share(row["baselines"]["most_frequent"]),
    "asked": _asked,
    "prediction": lambda row: format_seconds(row["pilot"]["latency_s"]["max"]),
    "stored": lambda row: format_bytes(int(row["pilot"]["artifact_bytes"]["max"])),
    "training": lambda row: format_seconds(row["pilot"]["training_s"]["mean"]),
}
