"""What moves when: blocks of a network, schedules of a reference string, the bound on both."""

from __future__ import annotations

from dynoffload.planning.blocks import UNSEEN, Block, Vocabulary
from dynoffload.planning.bound import PhaseBound, bound, phase_bound
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.planning.footprint import Footprint, WorkingSet, footprint
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
    "UNSEEN",
    "Action",
    "Block",
    "Footprint",
    "Kind",
    "LookAhead",
    "NextUse",
    "OnDemand",
    "PhaseBound",
    "Policy",
    "Schedule",
    "Use",
    "Vocabulary",
    "WorkingSet",
    "bound",
    "build_vocabulary",
    "footprint",
    "phase_bound",
]
