"""What a training would cost under any budget, policy and machine.

Event by event from recorded steps (`simulate`), and by formulas for machines and networks that are
not here (`designs`, `moe_cluster`, `movement`). It knows the profiler and planning.
"""

from __future__ import annotations

from dynoffload.simulation.execution import Execution, StepResult
from dynoffload.simulation.following import Plan
from dynoffload.simulation.intervals import Intervals
from dynoffload.simulation.machine import Link, Machine, load_costs, load_machine, load_machines
from dynoffload.simulation.policies import (
    Clairvoyant,
    Predicted,
    Replay,
    Strategy,
    UnifiedMemory,
)
from dynoffload.simulation.recompute import DTR, Capuchin
from dynoffload.simulation.run import Simulation, simulate
from dynoffload.simulation.workload import Step, Workload, workload

__all__ = [
    "DTR",
    "Capuchin",
    "Clairvoyant",
    "Execution",
    "Intervals",
    "Link",
    "Machine",
    "Plan",
    "Predicted",
    "Replay",
    "Simulation",
    "Step",
    "StepResult",
    "Strategy",
    "UnifiedMemory",
    "Workload",
    "load_costs",
    "load_machine",
    "load_machines",
    "simulate",
    "workload",
]
