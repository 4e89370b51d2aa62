"""A lower bound of a phase: at most the capacity is resident as it begins and as it ends."""

from __future__ import annotations

from collections.abc import Sequence

from dynoffload.planning.schedule import Use


def least_bytes(uses: Sequence[Use], sizes: Sequence[int], capacity: int) -> tuple[int, int]:
    """Return the bytes that any plan of ``uses`` reads and writes at least."""
    used: set[int] = set()
    read, modified = 0, set[int]()
    for use in uses:
        for region in {*use.regions, *use.creates} - used:
            read += 0 if region in use.creates else sizes[region]
        used |= {*use.regions, *use.creates}
        modified = (modified | {*use.writes, *use.creates}) - {*use.frees}
    left = sum(sizes[region] for region in modified)
    return max(0, read - capacity), max(0, left - capacity)


def least_seconds(
    uses: Sequence[Use], sizes: Sequence[int], capacity: int, read_bps: float, write_bps: float
) -> float:
    """Return the least time of a phase whose transfers overlap its uses."""
    reads, writes = least_bytes(uses, sizes, capacity)
    return max(sum(use.seconds for use in uses), reads / read_bps, writes / write_bps)
