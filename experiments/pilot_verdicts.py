"""What is asked of pilots, and whether it holds: means over seeds, their spread, and the verdicts.

What it is: `summary` of one case's seeds, and `verdicts` over all cases. What it is not: the scores
themselves (`dynoffload.experiments.pilot_scores`), nor how they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dynoffload.experiments.pilot_cases import STRUCTURE
from dynoffload.experiments.pilot_scores import BASELINES

STRUCTURE_ORDER, STRUCTURE_WHOLE = 0.99, 0.95
"""What is asked where the sample shows the structure: of block-order accuracy as the pilot steers,
and of the share of whole orders that are right."""
DATA_START, DATA_AHEAD = 0.90, 0.97
"""What is asked where the path follows from what the network computes: at the start of the step,
and one block ahead."""
NEAR_BEST = 0.01
"""How far the chosen kind may be from the best, where none reaches that."""
LATENCY_S, ARTIFACT_BYTES = 1e-3, 5_000_000
"""What one prediction may take, and what a stored pilot may."""

_COSTS = ("latency_s", "latency_p95_s", "artifact_bytes", "training_s")
_SCORES = ("block_order_accuracy", "byte_weighted", "whole_order", "site_f1")
_ENDS = ("steering", "alone", "whole_order", "one_ahead", "by_bytes")


def summary(origin: str, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a case's numbers over its seeds, each as mean, least and most, and its verdicts.

    Args:
        origin: of the case's dynamism.
        seeds: what `dynoffload.experiments.pilot_scores.scores` returned, at least one.
    """
    chosen = [one["kinds"][one["chosen"]] for one in seeds]
    kinds = {kind: [one["kinds"][kind] for one in seeds] for kind in _common(seeds)}
    baselines = {name: [one["baselines"][name] for one in seeds] for name in BASELINES}
    found = {
        "chosen": [one["chosen"] for one in seeds],
        "paths": _spread(one["paths"] for one in seeds),
        "pilot": {
            **_of_ends(chosen),
            **{key: _spread(one[key] for one in chosen) for key in _COSTS},
            **{key: _spread(one["steering"][key] for one in chosen) for key in _SCORES},
        },
        "kinds": {kind: _of_ends(rows) for kind, rows in kinds.items()},
        "baselines": {name: _of_ends(rows) for name, rows in baselines.items()},
        "curve": [
            {"samples": _spread(one["samples"] for one in points), **_of_ends(points)}
            for points in zip(*(one["curve"] for one in seeds), strict=True)
        ],
        "again": {
            key: _of_agreement([one["again"][key] for one in seeds])
            for key in ("all", "near", "far")
        },
    }
    return {**found, "verdicts": {**_verdicts(origin, found), **_at_every_seed(seeds)}}


def _at_every_seed(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return whether the chosen kind is better than every baseline at each seed by itself; None
    where there is one path."""
    key = "block_order_accuracy"
    better = [
        one["kinds"][one["chosen"]]["steering"][key]
        > max(one["baselines"][name][key] for name in BASELINES)
        for one in seeds
    ]
    several = max(one["paths"] for one in seeds) > 1
    return {"beats_at_every_seed": all(better) if several else None}


def _common(seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kinds that there are at every seed."""
    return [kind for kind in seeds[0]["kinds"] if all(kind in one["kinds"] for one in seeds)]


def _of_ends(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the order as a predictor steers and alone, whole orders and by bytes as it steers, and
    one block ahead; a baseline, which has nothing but the steps before, is always as it steers."""
    steering = [row.get("steering", row) for row in rows]
    found = (
        (one["block_order_accuracy"] for one in steering),
        (row["block_order_accuracy"] for row in rows),
        (one["whole_order"] for one in steering),
        (row["one_ahead"] for row in rows),
        (one["byte_weighted"] for one in steering),
    )
    return {key: _spread(values) for key, values in zip(_ENDS, found, strict=True)}


def _of_agreement(rows: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    there = [row for row in rows if row is not None]
    keys = ("steps_apart", "block_order_accuracy", "whole_order")
    return {key: _spread(row[key] for row in there) for key in keys} if there else None


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean, least and most; None where there is no number."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return {"mean": float(np.mean(there)), "min": min(there), "max": max(there)}


def _mean(found: Mapping[str, Any], key: str) -> float:
    return float(found[key]["mean"])


def _verdicts(origin: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is asked of a case: what was found, and whether it holds."""
    pilot, kinds = found["pilot"], found["kinds"]
    start, ahead = _mean(pilot, "steering"), _mean(pilot, "one_ahead")
    best = {
        key: max([_mean(pilot, key), *(_mean(one, key) for one in kinds.values())])
        for key in ("steering", "one_ahead")
    }
    short = {
        "start": best["steering"] - start,
        "ahead": best["one_ahead"] - ahead,
    }
    if origin == STRUCTURE:
        held = start >= STRUCTURE_ORDER and _mean(pilot, "whole_order") >= STRUCTURE_WHOLE
    else:
        held = start >= DATA_START and ahead >= DATA_AHEAD
    strongest = max(
        found["baselines"], key=lambda name: _mean(found["baselines"][name], "steering")
    )
    strongest_start = _mean(found["baselines"][strongest], "steering")
    several = found["paths"]["max"] > 1
    return {
        "reached": held,
        "short_of_best": short,
        "near_best": all(gap <= NEAR_BEST for gap in short.values()),
        "strongest_baseline": strongest,
        "over_baselines": start - strongest_start,
        "beats_baselines": start > strongest_start if several else None,
        "latency": pilot["latency_s"]["max"] <= LATENCY_S,
        "artifact": pilot["artifact_bytes"]["max"] <= ARTIFACT_BYTES,
    }


def verdicts(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return in how many cases what is asked holds, and in which it does not.

    Args:
        cases: by key, each with its ``origin`` and ``summary``.
    """
    by_origin: dict[str, dict[str, Any]] = {}
    for key, case in cases.items():
        by_origin.setdefault(case["origin"], {})[key] = case["summary"]["verdicts"]
    every = {key: one for group in by_origin.values() for key, one in group.items()}
    asked: dict[str, Any] = {}
    for origin, group in by_origin.items():
        asked[origin] = _count({key: one["reached"] for key, one in group.items()})
    asked["near_best"] = _count(
        {key: one["near_best"] for key, one in every.items() if not one["reached"]}
    )
    for name in ("beats_baselines", "beats_at_every_seed", "latency", "artifact"):
        asked[name] = _count({k: one[name] for k, one in every.items() if one[name] is not None})
    return asked


def _count(held: Mapping[str, bool]) -> dict[str, Any]:
    missed = [key for key, one in held.items() if not one]
    return {"cases": len(held), "held": len(held) - len(missed), "missed": missed}
