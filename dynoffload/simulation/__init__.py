"""What a training would cost under any budget, policy and machine.

Event by event from recorded steps: operator by operator under any policy (`simulate`), or as the
runtime moves it (`Training`); and by formulas for machines and networks that are
not here (`designs`, `moe_cluster`, `movement`). It knows the profiler and planning.
"""

from __future__ import annotations

from dynoffload.simulation.execution import Execution, StepResult
from dynoffload.simulation.following import Plan
from dynoffload.simulation.intervals import Intervals
from dynoffload.simulation.machine import Link, Machine, load_costs, load_machine, load_machines
from dynoffload.simulation.own_work import Division, Work
from dynoffload.simulation.policies import (
    Clairvoyant,
    Predicted,
    Replay,
    Strategy,
    UnifiedMemory,
)
from dynoffload.simulation.recompute import DTR, Capuchin
from dynoffload.simulation.recorded import Network, Recorded, network_of, recorded
from dynoffload.simulation.run import Simulation, simulate
from dynoffload.simulation.training import Training
from dynoffload.simulation.workload import Step, Workload, workload

__all__ = [
    "DTR",
    "Capuchin",
    "Clairvoyant",
    "Division",
    "Execution",
    "Intervals",
    "Link",
    "Machine",
    "Network",
    "Plan",
    "Predicted",
    "Recorded",
    "Replay",
    "Simulation",
    "Step",
    "StepResult",
    "Strategy",
    "Training",
    "UnifiedMemory",
    "Work",
    "Workload",
    "load_costs",
    "load_machine",
    "load_machines",
    "network_of",
    "recorded",
    "simulate",
    "workload",
]
