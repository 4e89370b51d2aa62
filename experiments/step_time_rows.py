"""The rows of `dynoffload.experiments.step_time`, and what comes of them.

What it is: both sides of a policy under a budget as one row, and who is fastest where. What it is
not: the sides (`step_time_runs`, `step_time_policies`), nor their presentation (`step_time_views`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import fmean, median
from typing import Any

from dynoffload.experiments.step_time_policies import BOUND, PILOT, POLICIES, PUBLISHED, Side
from dynoffload.experiments.step_time_runs import Measured
from dynoffload.units import format_bytes

_TIE = 1.1


def merged(runs: Sequence[Measured]) -> Measured:
    """Return several runs as one: of all steps, and with no time if one run has none."""
    failed = [one.side.why for one in runs if one.side.why]
    equal = [one.losses_equal for one in runs if one.losses_equal is not None]
    side = Side(
        why=failed[0] if failed else "",
        steps_s=tuple(second for one in runs for second in one.side.steps_s),
        bytes_in=fmean(one.side.bytes_in for one in runs),
        bytes_out=fmean(one.side.bytes_out for one in runs),
        note=next((one.side.note for one in runs if one.side.note), ""),
    )
    return Measured(side, all(equal) if equal else None, runs[0].sizing)


def plain_row(
    network: str,
    share: Fraction,
    budget: int,
    beside: Sequence[float],
    plain: Sequence[float],
) -> dict[str, Any]:
    """Return the row of plain training, which has no budget: the reference of the others."""
    own = Measured(Side(steps_s=tuple(beside)))
    return row_of(network, "plain", share, budget, own, Side(steps_s=tuple(plain)), beside, plain)


def row_of(
    network: str,
    policy: str,
    share: Fraction,
    budget: int,
    own: Measured | None,
    other: Side,
    beside: Sequence[float],
    plain: Sequence[float],
) -> dict[str, Any]:
    """Return one row of the result.

    Args:
        network: its name.
        policy: a key of `POLICIES`, or ``"plain"``.
        share: of the footprint that the budget is.
        budget: bytes.
        own: the measured side, None if there is none.
        other: the simulated side.
        beside: seconds of plain steps that took turns with the measured ones.
        plain: those that the simulation was made of.
    """
    mine = own.side if own is not None else None
    sides = {"measured": mine, "simulated": other}
    reference = {"measured": median(beside), "simulated": median(plain)}
    return {
        "network": network,
        "policy": policy,
        "budget_fraction": float(share),
        "budget": str(share),
        "budget_bytes": budget,
        "measured_s": mine.seconds if mine is not None else None,
        "steps_s": list(mine.steps_s) if mine is not None else [],
        "simulated_s": other.seconds,
        "over_plain": {
            side: one.seconds / reference[side] if one and one.seconds is not None else None
            for side, one in sides.items()
        },
        **{
            key: {
                side: round(getattr(one, key)) if one and one.seconds is not None else None
                for side, one in sides.items()
            }
            for key in ("bytes_in", "bytes_out")
        },
        "infeasible": {side: one.why or None if one else None for side, one in sides.items()},
        "losses_equal": own.losses_equal if own is not None else None,
        "note": "; ".join(one.note for one in sides.values() if one and one.note),
    }


# What comes of it


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return who is fastest where, and how the pilot stands against the others.

    A ratio is how many times longer a step of the other takes: above 1 the pilot is faster. What
    knows every step is none of the others.
    """
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["policy"] != "plain":
            cells.setdefault((row["network"], row["budget"]), []).append(row)
    found: list[dict[str, Any]] = [
        {"network": network, "budget": budget}
        | {side: standing(own, side) for side in ("measured", "simulated")}
        for (network, budget), own in cells.items()
    ]
    measured = [one["measured"] for one in found if one["measured"] is not None]
    over = [one["over_published"] for one in measured if one["over_published"] is not None]
    losses = [row["losses_equal"] for row in rows if row["losses_equal"] is not None]
    return {
        "cells": found,
        "over_published": {
            "least": min(over, default=None),
            "most": max(over, default=None),
            "cells": len(over),
        },
        "errors": _errors(rows),
        "losses_equal": all(losses),
    }


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how far simulated times over plain ones are from measured ones, by policy."""
    found: dict[str, list[float]] = {}
    for row in rows:
        own, other = (row["over_plain"][side] for side in ("measured", "simulated"))
        if row["policy"] != "plain" and own is not None and other is not None:
            found.setdefault(row["policy"], []).append(abs(other / own - 1))
    return {
        policy: {"cells": len(each), "median": median(each), "worst": max(each)}
        for policy, each in found.items()
    }


def standing(rows: Sequence[Mapping[str, Any]], side: str) -> dict[str, Any] | None:
    """Return the fastest of one budget, and the pilot against the best of the others, each alone
    and those of the published figure; None if no policy has a time. Simulated, only what is
    simulated as the runtime is ranked."""
    times = {
        row["policy"]: row["over_plain"][side]
        for row in rows
        if row["over_plain"][side] is not None
        and row["policy"] != BOUND
        and (side == "measured" or POLICIES[row["policy"]].strategy is None)
    }
    if not times:
        return None
    pilot = times.get(PILOT)
    others = {key: value for key, value in times.items() if key != PILOT}
    ratios = {key: value / pilot for key, value in others.items()} if pilot else {}
    rivals = [ratios[key] for key in PUBLISHED if key in ratios]
    best = min(others, key=lambda key: others[key], default=None)
    return {
        "fastest": min(times, key=lambda key: times[key]),
        "best_other": best,
        "pilot_over_plain": pilot,
        "ratio": ratios.get(best) if best is not None else None,
        "loses": [key for key, ratio in ratios.items() if ratio < 1],
        "ratios": ratios,
        "over_published": min(rivals, default=None),
    }


def said(result: Mapping[str, Any]) -> list[str]:
    """Return the result in words, where the pilot loses too."""
    lines = []
    for cell in result["summary"]["cells"]:
        where = f"{cell['network']}, {cell['budget']}"
        for side in ("measured", "simulated"):
            found = cell[side]
            if found is None:
                lines.append(f"{where}, {side}: no policy runs")
                continue
            title = POLICIES[found["fastest"]].title
            line = f"{where}, {side}: {title} is fastest"
            if found["pilot_over_plain"] is None:
                line += "; the pilot has no time"
            elif found["ratio"] is None:
                line += "; nothing to compare it with"
            else:
                best = POLICIES[found["best_other"]].title
                verdict = "wins" if found["ratio"] >= 1 else "loses"
                if is_tie(found["ratio"]):
                    verdict = "ties"
                line += f"; the pilot {verdict} against {best}, {found['ratio']:.2f} times"
            lines.append(line)
    return lines + overall(result)


def is_tie(ratio: float) -> bool:
    """Return whether two times are too close to say which is less: single steps of one policy
    differ by more."""
    return 1 / _TIE < ratio < _TIE


def overall(result: Mapping[str, Any]) -> list[str]:
    """Return in words what comes of all rows together."""
    lines = []
    over = result["summary"]["over_published"]
    if over["most"] is None:
        lines.append(
            "nowhere did the pilot run beside paging by the system or DTR: nothing to set beside "
            f"the published {result['published']}"
        )
    else:
        lines.append(
            "the pilot against the better of paging by the system and DTR: "
            f"{over['least']:.2f} to {over['most']:.2f} times as fast, in {over['cells']} cells "
            f"where one of them runs ({_where(result)}). These cells are too unlike for a median, "
            f"or to stand beside the published {result['published']}, which is of other networks"
        )
    equal = result["summary"]["losses_equal"]
    lines.append(
        "losses are bit for bit those of plain training in every run, as far as it came"
        if equal
        else "LOSSES DIFFER from those of plain training: see the rows"
    )
    return lines


def _where(result: Mapping[str, Any]) -> str:
    """Return each budget under which a policy of the published figure was measured."""
    return ", ".join(
        f"{cell['network']} {cell['budget']}: {cell['measured']['over_published']:.2f}"
        for cell in result["summary"]["cells"]
        if cell["measured"] and cell["measured"]["over_published"] is not None
    )


def budget_name(row: Mapping[str, Any]) -> str:
    """Return what tables call a row's budget."""
    return f"{row['budget']} ({format_bytes(row['budget_bytes'])})"
