"""Simulates the cost of training under any budget and on any machine.

Recorded steps are simulated event by event: operator by operator (`simulate`), or with the
runtime's transfers (`Training`). Formulas cover machines and networks that are not available
(`designs`, `moe_cluster`, `movement`).
"""

from __future__ import annotations

from dynoffload.simulation.execution import Simulation, simulate
from dynoffload.simulation.machine import Link, Machine, load_costs, load_machines
from dynoffload.simulation.overhead import Division, RuntimeOverhead
from dynoffload.simulation.recorded import Network, Recorded, network_of, recorded
from dynoffload.simulation.training import Training
from dynoffload.simulation.workload import Step, Workload, workload

__all__ = [
    "Division",
    "Link",
    "Machine",
    "Network",
    "Recorded",
    "RuntimeOverhead",
    "Simulation",
    "Step",
    "Training",
    "Workload",
    "load_costs",
    "load_machines",
    "network_of",
    "recorded",
    "simulate",
    "workload",
]
