"""What `dynoffload.experiments.gpu` is to reach, and whether its numbers do.

What it is: `judge`, from rows to verdicts, and the numbers that rows are read by: how long copies
take at least, overlap, and the share of the link that is used. What it is not: measured; whatever
lacks a row says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dynoffload.experiments.gpu_rows import MEASURED
from dynoffload.experiments.gpu_ways import FILES, HOSTED, OURS, PLAIN, WAYS

REACHED, MISSED, NOT_MEASURED = "reached", "MISSED", "not measured"
SAME = 0.02
"""Steps of one way differ by as much from run to run: who is slower by no more is as fast."""
Row = Mapping[str, Any]


def copy_seconds(row: Row, link: Row | None) -> float | None:
    """Return what a row's bytes take on the link at least; None where that is not known."""
    if link is None or row["state"] != MEASURED or row.get("bytes_in") is None:
        return None
    return float(
        max(row["bytes_in"] / link["both_in_bps"], row["bytes_out"] / link["both_out_bps"])
    )


def link_share(row: Row, link: Row | None) -> float | None:
    """Return which share of the measured bandwidth a row's step uses, in its busier direction."""
    copies = copy_seconds(row, link)
    return None if copies is None else copies / float(row["seconds"])


def overlap(row: Row, plain: Row | None, link: Row | None) -> float | None:
    """Return how far copies and computation run at one time; see [Note: bound] in `gpu`."""
    copies = copy_seconds(row, link)
    if copies is None or plain is None or plain["state"] != MEASURED:
        return None
    compute, least = float(plain["seconds"]), min(copies, float(plain["seconds"]))
    return (copies + compute - float(row["seconds"])) / least if least else None


def plain_of(result: Mapping[str, Any], row: Row) -> Row | None:
    """Return plain training's row of the same network and batch, in memory."""
    for other in result["rows"]:
        same = all(other.get(key) == row.get(key) for key in ("part", "network", "tokens"))
        if same and other.get("way") == PLAIN and other.get("share") == "1":
            found: Row = other
            return found
    return None


def judge(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a verdict for each number that is to be reached.

    Returns:
        ``what`` is asked, the ``target`` in words, the ``found`` number or None, ``where`` it was
        found, and the ``state``: `REACHED`, `MISSED` or `NOT_MEASURED`.
    """
    rows = [row for row in result["rows"] if row["state"] == MEASURED]
    return [
        *_capacity(rows),
        *_bounds(result, rows),
        _of_link(result, rows),
        _computing(result, rows),
        _peers(rows),
        _exact(rows),
        _allocated(rows),
        _charged(rows),
    ]


def _verdict(
    what: str, target: str, found: float | None, reached: Callable[[float], bool], where: str = ""
) -> dict[str, Any]:
    state = NOT_MEASURED if found is None else REACHED if reached(found) else MISSED
    return {"what": what, "target": target, "found": found, "where": where, "state": state}


def _capacity(rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
    sizes: dict[str, int] = {}
    for row in rows:
        if row["part"] == "capacity":
            sizes[row["way"]] = max(sizes.get(row["way"], 0), row["parameters"])
    for way, least in ((OURS, 8.0), (FILES, 16.0)):
        known = PLAIN in sizes and way in sizes
        yield _verdict(
            f"parameters of {WAYS[way].title} over plain's, at one cap",
            f"at least {least:g} times",
            sizes[way] / sizes[PLAIN] if known else None,
            lambda found, least=least: found >= least,  # type: ignore[misc]
        )


def _bounds(result: Mapping[str, Any], rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
    for network in ("moe", "evoformer"):
        found = None
        for row in rows:
            place = [row.get(key) for key in ("part", "network", "way", "share")]
            copies, plain = copy_seconds(row, result["link"]), plain_of(result, row)
            if place == ["steps", network, OURS, "1/8"] and copies is not None and plain:
                found = row["seconds"] / max(copies, plain["seconds"])
        yield _verdict(
            f"{network}: step at 1/8 over the larger of computing and copying",
            "at most 1.10 times",
            found,
            lambda found: found <= 1.10,
        )


def _of_link(result: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Judge the least share of the link that is used where copies take longer than computing."""
    least: tuple[float, str] | None = None
    for row in _timed(rows):
        copies, plain = copy_seconds(row, result["link"]), plain_of(result, row)
        share = link_share(row, result["link"])
        if copies is None or share is None or plain is None or copies <= plain["seconds"]:
            continue
        if least is None or share < least[0]:
            least = share, _place(row)
    found, where = (None, "") if least is None else least
    return _verdict(
        "share of the link's bandwidth that is used where that is the bound",
        "at least 90%",
        found,
        lambda found: found >= 0.9,
        where,
    )


def _computing(result: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Judge the longest batch of which computing takes longer than copying."""
    found, where, longest = None, "", 0
    for row in rows:
        if row["part"] != "tokens" or row["way"] != OURS or row["tokens"] < longest:
            continue
        copies, plain = copy_seconds(row, result["link"]), plain_of(result, row)
        if copies is None or plain is None or copies > plain["seconds"]:
            continue
        found, where = row["seconds"] / plain["seconds"], _place(row)
        longest = row["tokens"]
    return _verdict(
        "step over plain's in memory where computing is the bound",
        "at most 1.05 times",
        found,
        lambda found: found <= 1.05,
        where,
    )


def _peers(rows: Sequence[Row]) -> dict[str, Any]:
    """Judge by how much a peer is faster at the same cap, at the worst."""
    ratios = [
        (
            row["seconds"] / other["seconds"],
            f"{_place(row)} against {WAYS[other['way']].title}",
        )
        for row in rows
        if row["part"] == "steps" and row["way"] == OURS
        for other in rows
        if all(other.get(key) == row[key] for key in ("part", "network", "share"))
        and other["way"] not in (OURS, FILES, HOSTED)
    ]
    found, where = max(ratios, default=(None, ""))
    return _verdict(
        "step over that of a peer at the same cap, at the worst",
        f"at most 1, within {SAME:.0%}",
        found,
        lambda found: found <= 1 + SAME,
        where,
    )


def _exact(rows: Sequence[Row]) -> dict[str, Any]:
    """Judge the share of our rows beside plain ones whose losses are plain's, bit by bit."""
    compared = [row for row in _timed(rows) if row.get("losses_equal") is not None]
    equal = [row for row in compared if row["losses_equal"]]
    other = next((_place(row) for row in compared if not row["losses_equal"]), "")
    return _verdict(
        "rows whose losses are plain training's, bit by bit",
        "all",
        len(equal) / len(compared) if compared else None,
        lambda found: found == 1.0,
        other,
    )


def _allocated(rows: Sequence[Row]) -> dict[str, Any]:
    """Judge the allocator's peak after the first step, in which nobody knows what operators take,
    over the budget, at the worst."""
    ratios = [
        (row["peak_allocated"] / row["task"]["budget_bytes"], _place(row))
        for row in rows
        if row.get("way") in (OURS, FILES) and row.get("peak_allocated")
    ]
    found, where = max(ratios, default=(None, ""))
    return _verdict(
        "the allocator's peak over the budget, at the worst",
        "at most 1",
        found,
        lambda found: found <= 1,
        where,
    )


def _charged(rows: Sequence[Row]) -> dict[str, Any]:
    """Judge host memory that is charged, of networks that were never whole on the host."""
    ratios = [
        (row["charged_bytes"] / row["pinned_bytes"], _place(row))
        for row in rows
        if row.get("pinned_bytes") and row["task"]["meta"]
    ]
    found, where = max(ratios, key=lambda one: abs(one[0] - 1), default=(None, ""))
    return _verdict(
        "host memory charged over bytes pinned, at the worst",
        "1, within 2%",
        found,
        lambda found: abs(found - 1) <= 0.02,
        where,
    )


def _timed(rows: Sequence[Row]) -> Iterable[Row]:
    return (row for row in rows if row["part"] in ("steps", "tokens") and row["way"] == OURS)


def _place(row: Row) -> str:
    if row["part"] == "capacity":
        return f"{row['layers']} layers, {WAYS[row['way']].title}"
    batch = f", {row['tokens']} tokens" if "tokens" in row else ""
    return f"{row['network']}{batch} at {row['share']}"
