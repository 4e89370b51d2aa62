"""The doctor's advice: which budget fits this machine and which backend it gets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynoffload.doctor.system import FileSystem, System, filesystem_of, inspect
from dynoffload.doctor.tiers import Progress, Tiers, measure_tiers
from dynoffload.errors import SpillError
from dynoffload.units import GiB, MiB, format_bytes

RESERVE = GiB
"""Least bytes left for the process itself, operator temporaries and other programs."""
RESERVE_SHARE = 0.15
"""Share of the free memory left for them, if that is more."""
_ROUND = 64 * MiB


@dataclass(frozen=True)
class Advice:
    """Which budget and backend fit.

    Attributes:
        budget: largest budget in bytes that leaves the reserve; 0 if none does.
        room: bytes free for this process by memory and cgroup.
        bound_by: ``"memory"`` or ``"cgroup"``, whichever leaves less.
        backend: ``"pager"`` or ``"mapped"``.
        backend_reason: why the pager cannot be used, or how it can.
        line: all of this in one line.
    """

    budget: int
    room: int
    bound_by: str
    backend: str
    backend_reason: str
    line: str


@dataclass(frozen=True)
class Examination:
    """Results of the doctor.

    Attributes:
        system: system limits.
        filesystem: of the spill directory, ``None`` if it cannot be used at all.
        tiers: measured bandwidth, ``None`` if the directory was refused.
        refusal: why the spill directory was refused, ``""`` if it was not.
        advice: which budget and backend fit.
    """

    system: System
    filesystem: FileSystem | None
    tiers: Tiers | None
    refusal: str
    advice: Advice

    def to_json(self) -> dict[str, Any]:
        """Return the examination as JSON values; bytes are ints, bandwidth is bytes per second."""
        return asdict(self)


def examine(
    spill_dir: Path, *, seconds: float = 1.0, progress: Progress | None = None
) -> Examination:
    """Inspect the system and measure the tiers; a refused directory is reported, not raised."""
    system = inspect()
    filesystem: FileSystem | None = None
    tiers: Tiers | None = None
    refusal = ""
    try:
        filesystem = filesystem_of(spill_dir)
        tiers = measure_tiers(spill_dir, seconds, progress=progress)
    except SpillError as error:
        refusal = str(error)
    advice = advise(system, filesystem, refusal)
    return Examination(system, filesystem, tiers, refusal, advice)


def advise(system: System, filesystem: FileSystem | None, spill_refusal: str = "") -> Advice:
    """Return which budget fits and which backend ``"auto"`` chooses.

    Args:
        system: system limits.
        filesystem: of the spill directory.
        spill_refusal: why that directory cannot be used, ``""`` if it can.
    """
    room = system.room
    bound_by = "cgroup" if room < system.memory_available else "memory"
    reserve = max(RESERVE, math.ceil(room * RESERVE_SHARE))
    budget = max(0, room - reserve) // _ROUND * _ROUND
    backend = "mapped" if system.pager_refusal else "pager"
    scope = "userfaultfd, user mode only" if system.user_mode else "userfaultfd"
    reason = system.pager_refusal or scope
    if spill_refusal or filesystem is None:
        line = f"Nothing can be spilled: {spill_refusal or 'there is no spill directory'}"
    elif budget == 0:
        line = (
            f"No budget fits: {format_bytes(room)} free by {bound_by}, "
            f"{format_bytes(reserve)} are needed for the process itself"
        )
    else:
        line = (
            f"Budgets up to {format_bytes(budget)} fit ({format_bytes(room)} free by {bound_by}, "
            f"{format_bytes(reserve)} kept for the process); up to "
            f"{format_bytes(filesystem.free_bytes)} can be spilled; backend {backend} ({reason})"
        )
    return Advice(budget, room, bound_by, backend, reason, line)
