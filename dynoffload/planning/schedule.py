"""Schedules of transfers: the types shared by the planner, executors and simulations.

A schedule is advice: executing it late or in part costs time, never correctness. Regions are
identified by index only, so that it can be tested without a network.

[Note: When an action may run]
A step is a string of uses; *progress* is the number of uses that are over. An action with position
``p`` may start once progress has reached ``p``, that is after use ``p - 1`` and before use ``p``.
An executor may execute the actions at any later time, under three rules:

* evictions start as soon as their position is reached; they wait for nothing;
* fetches run in the order of the list and wait until there is room;
* a use waits until its regions are resident and there is room for the regions it creates.

If a schedule fits with every action at its earliest time, it fits under any delay, since a delayed
fetch only leaves more room. At one position the list has evictions before fetches, so executing it
in order is correct too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from dynoffload.errors import BudgetError
from dynoffload.units import format_bytes


@dataclass(frozen=True, slots=True)
class Use:
    """One element of a reference string: work during which its regions must stay resident.

    Attributes:
        regions: indices of the regions that are read or modified.
        creates: regions that are created here, without a read from the lower tier; they may be
            in ``regions`` too.
        frees: regions that are dead after this use: discarded without a write. A freed region is
            not used again unless a later use creates it.
        writes: which of ``regions`` are modified, so that evicting them costs a write. Created
            regions count as modified.
        seconds: duration of the work itself.
        doubtful: whether nothing is fetched for it ahead. It decides what is evicted all the same.
    """

    regions: tuple[int, ...]
    creates: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    seconds: float = 0.0
    writes: tuple[int, ...] = ()
    doubtful: bool = False


class Kind(IntEnum):
    """The direction of a transfer."""

    FETCH = 0
    """From the lower tier into fast memory."""
    EVICT = 1
    """Out of fast memory; bytes are written only if the region is dirty."""


class Action(NamedTuple):
    """One transfer: ``region`` may start to move when progress has reached ``position``."""

    position: int
    kind: Kind
    region: int


@dataclass(frozen=True)
class Schedule:
    """The transfers for one reference string.

    Attributes:
        actions: transfers in the order of execution (see the note of this module).
    """

    actions: tuple[Action, ...]


def infeasible(position: int, need: int, have: int) -> BudgetError:
    """Return the error for a use whose regions alone exceed fast memory."""
    error = BudgetError(
        f"use {position} of the plan needs {format_bytes(need)} ({need} bytes) resident at once, "
        f"but there are {format_bytes(have)} ({have} bytes): raise the budget to at least that, or "
        "make the operator smaller (fewer samples or a shorter sequence per step, or a split layer)"
    )
    error.lacking = need - have
    return error
