"""What moves when: blocks of a network, schedules of a reference string, the bound on both.

And what a network can do at all: the one control flow of its samples (`Structure`).
"""

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
from dynoffload.planning.structure import Path, Size, Step, Structure

__all__ = [
    "UNSEEN",
    "Action",
    "Block",
    "Footprint",
    "Kind",
    "LookAhead",
    "NextUse",
    "OnDemand",
    "Path",
    "PhaseBound",
    "Policy",
    "Schedule",
    "Size",
    "Step",
    "Structure",
    "Use",
    "Vocabulary",
    "WorkingSet",
    "bound",
    "build_vocabulary",
    "footprint",
    "phase_bound",
]
