"""What moves when: blocks of a network, and schedules of a reference string."""

from __future__ import annotations

from dynoffload.planning.blocks import UNSEEN, Block, Vocabulary
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
    "Policy",
    "Schedule",
    "Use",
    "Vocabulary",
    "WorkingSet",
    "build_vocabulary",
    "footprint",
]
