"""What moves when: blocks of a network, schedules of a reference string, the bound on both."""

from __future__ import annotations

from dynoffload.planning.bound import PhaseBound, bound, phase_bound
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import (
    Action,
    Kind,
    NextUse,
    OnDemand,
    Policy,
    Schedule,
    Use,
)

__all__ = [
    "Action",
    "Kind",
    "LookAhead",
    "NextUse",
    "OnDemand",
    "PhaseBound",
    "Policy",
    "Schedule",
    "Use",
    "bound",
    "phase_bound",
]
